import os

os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ["GLOO_SOCKET_IFNAME"] = "lo"
os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
