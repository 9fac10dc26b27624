// A command of the program: a name, a line about it, and a function that declares its options and returns what it does.
//
// Each command lives in one file, <name>_command.cc (verify.cc), and is listed once, in main.cc. Errors are thrown: main()
// prints them and chooses the exit code.
#pragma once

#include <functional>
#include <string>

namespace CLI {
class App;
}

namespace ringspan::cli {

// Documented in docs/cli.md; what scripts branch on.
enum ExitCode : int {
  kOk = 0,
  kVerificationFailed = 1,
  kBadArguments = 2,
  kUnsupported = 3,
  kOutOfMemory = 4,
  kCommunication = 5,
  kInputOutput = 6,
  kDevice = 7,
  kInternal = 70,
  kInterrupted = 130,
};

// Runs after the arguments were parsed; returns the exit code.
using Body = std::function<int()>;

struct Command {
  const char* name;
  const char* summary;
  Body (*setup)(CLI::App& app);
  bool asks = false;  // whether it was interrupted (watch.h); the others end at the first signal
};

std::string program_version();  // "0.1.0"

Body setup_run(CLI::App& app);
Body setup_plan(CLI::App& app);
Body setup_verify(CLI::App& app);
Body setup_bench(CLI::App& app);
Body setup_capabilities(CLI::App& app);
Body setup_selftest(CLI::App& app);
Body setup_inspect(CLI::App& app);
Body setup_doctor(CLI::App& app);
Body setup_tune(CLI::App& app);

}  // namespace ringspan::cli
