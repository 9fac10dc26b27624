import os

os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ["RINGSPAN_TUNE_FILE"] = ""  # what was tuned on this machine is not what is tested
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
