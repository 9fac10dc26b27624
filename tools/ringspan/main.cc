// ringspan: the command-line program. Finds the command, runs it, turns errors into messages and exit codes.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <exception>
#include <new>
#include <string>
#include <system_error>
#include <vector>

#include "command.h"
#include "help.h"
#include "ringspan/error.h"
#include "ringspan/version.h"
#include "suggest.h"
#include "text.h"
#include "watch.h"

namespace ringspan::cli {
namespace {

constexpr Command kCommands[] = {
    {"run", "attention on the q, k, v of a file, forward and backward, over several ranks", setup_run, true},
    {"plan", "what each rank would compute, send and keep; needs no data", setup_plan},
    {"verify", "check results against a float64 reference, on one problem or on random ones", setup_verify, true},
    {"bench", "time a problem against one rank, verified first", setup_bench, true},
    {"capabilities", "which combinations are implemented", setup_capabilities},
    {"selftest", "check and time communication between ranks on this machine", setup_selftest, true},
    {"inspect", "what is in a safetensors file", setup_inspect},
    {"doctor", "what this machine has, what of it is used and why", setup_doctor},
    {"tune", "measure tiles and buckets on this machine, and keep what is faster", setup_tune, true},
};

constexpr const char* kExamples = R"(examples
  ringspan inspect qkv.safetensors
  ringspan run --input qkv.safetensors --output out.safetensors --ranks 4 --pattern causal --verify
  ringspan plan --tokens 1000000 --ranks 64 --pattern "dilated:2048x1,4096x2,8192x4"
  ringspan verify --random 100 --seed 1

exit codes
  0 ok    1 verification failed    2 bad arguments    3 not supported    4 out of memory or budget
  5 communication    6 input or output    7 device    70 internal error    130 interrupted

`ringspan COMMAND --help` explains a command; docs/cli.md has the grammar of patterns.)";

void print_error(const std::string& message) { print_stderr(fmt::format("ringspan: error: {}\n", printable(message, '\n'))); }

std::vector<std::string> option_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::Option* option : app.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  }
  return names;
}

// What was typed and is not known, empty where there is nothing; CLI11 names it only where nothing else is wrong.
std::string unexpected(const CLI::App& app, const CLI::App* command) {
  const bool before = command == nullptr || command->remaining().empty();  // in front of the command
  const std::vector<std::string> rest = before ? app.remaining() : command->remaining();
  if (rest.empty()) return {};
  const std::string& first = rest.front();
  if (before) {
    if (first.starts_with("-")) return fmt::format("unknown option {}{}", first, did_you_mean(first, option_names(app)));
    std::vector<std::string> names;
    for (const Command& known : kCommands) names.emplace_back(known.name);
    return fmt::format("unknown command {}{}", first, did_you_mean(first, names));
  }
  if (!first.starts_with("-")) return fmt::format("{}: unexpected argument {}", command->get_name(), first);
  const std::string name = first.substr(0, first.find('='));
  std::string hint = did_you_mean(name, option_names(*command));
  if (hint.empty() && command->get_option_no_throw("problem") != nullptr)
    hint = "; a problem is words, such as nq=1000 h=8 d=64";
  return fmt::format("{}: unknown option {}{}", command->get_name(), name, hint);
}

int parse_failure(CLI::App& app, const CLI::ParseError& error) {
  if (error.get_exit_code() == static_cast<int>(CLI::ExitCodes::Success)) return app.exit(error);  // --help, --version
  const auto chosen = app.get_subcommands();
  const CLI::App* command = chosen.empty() ? nullptr : chosen.front();
  const std::string help = command != nullptr ? fmt::format("ringspan {} --help", command->get_name()) : "ringspan --help";
  std::string message = error.what();
  if (dynamic_cast<const CLI::ConversionError*>(&error) != nullptr) {
    // "Could not convert: --json = foo": only flags are converted, other values have parsers of their own.
    const std::size_t name = message.find("--"), equals = message.find(" = ");
    if (name < equals && equals != std::string::npos) {
      const std::string value = message.substr(equals + 3);
      message = fmt::format("{} ({}) takes true, false or no value", message.substr(name, equals - name), value);
    }
  } else if (dynamic_cast<const CLI::ArgumentMismatch*>(&error) != nullptr) {
    const std::string name = message.substr(0, message.find(':'));
    const CLI::Option* option = command != nullptr ? command->get_option_no_throw(name) : nullptr;
    message = name + (option != nullptr && option->count() > 1 ? " is given twice" : " needs a value");
  } else if (const std::string unknown = unexpected(app, command); !unknown.empty()) {
    message = unknown;
  }
  print_error(message);
  print_stderr(fmt::format("see `{}`\n", help));
  return kBadArguments;
}

// What was printed has arrived, or the reader of a pipe has gone, which is its business.
int flushed(int code) {
  if (std::fflush(stdout) == 0 && std::ferror(stdout) == 0) return code;
  print_error(fmt::format("standard output: cannot be written: {}", std::strerror(errno)));
  return kInputOutput;
}

// An interrupt, or a file that a forked rank could not read, shows in many ways, depending on what it hits.
int failed(ExitCode code, std::string message) {
  if (const std::string file = unreadable_file(); !file.empty()) code = kInputOutput, message = file;
  if (is_interrupted()) code = kInterrupted, message = "interrupted";
  print_error(message);
  return code;
}

int run_guarded(const std::function<int()>& body) {
  try {
    return flushed(body());
  } catch (const InvalidArgument& error) {
    return failed(kBadArguments, error.what());
  } catch (const Unsupported& error) {
    return failed(kUnsupported, error.what());
  } catch (const OutOfBudget& error) {
    return failed(kOutOfMemory, error.what());
  } catch (const CommError& error) {
    return failed(kCommunication, error.what());
  } catch (const DeviceError& error) {
    return failed(kDevice, error.what());
  } catch (const Error& error) {  // FileError, and what the system refused
    return failed(kInputOutput, error.what());
  } catch (const std::system_error& error) {  // printing, or a thread that was not to be had
    const char* what = std::ferror(stdout) != 0 ? "standard output" : "the system refuses what this needs";
    return failed(kInputOutput, fmt::format("{}: {}", what, error.what()));
  } catch (const std::bad_alloc&) {
    return failed(
        kOutOfMemory,
        "out of memory: a rank takes less with more ranks, --memory or `run --sequential`, and planning with fewer ranks");
  } catch (const std::exception& error) {
    return failed(kInternal, fmt::format("internal error, please report it: {}", error.what()));
  }
}

int main_body(int argc, char** argv) {
  CLI::App app{"ringspan: exact attention over sequences that no single device can hold", "ringspan"};
  app.set_version_flag("--version", "ringspan " + program_version(), "print the version");
  app.formatter(make_help_formatter());  // subcommands inherit it
  app.get_help_ptr()->description("this page");
  app.require_subcommand(0, 1);
  struct Choice {
    CLI::App* sub;
    Body body;
    bool asks;
  };
  std::vector<Choice> choices;
  for (const Command& command : kCommands) {
    CLI::App* sub = app.add_subcommand(command.name, command.summary);
    sub->get_help_ptr()->description("this page");
    choices.push_back({sub, command.setup(*sub), command.asks});
    for (CLI::Option* option : sub->get_options({})) {
      const bool flag = option->get_items_expected_max() == 0;
      if (flag) option->multi_option_policy(CLI::MultiOptionPolicy::Throw);  // as for options with a value
    }
  }
  app.footer(kExamples);  // after the commands, which inherit all that is there
  try {
    app.parse(argc, argv);
  } catch (const CLI::ParseError& error) {
    return parse_failure(app, error);
  }
  for (const auto& [sub, body, asks] : choices) {
    if (!sub->parsed()) continue;
    catch_interrupts();
    if (asks) return body();
    const EndAtSignal interruptible;
    return body();
  }
  print_stderr(app.help());
  return kBadArguments;
}

}  // namespace

std::string program_version() {
  return fmt::format("{}.{}.{}", RINGSPAN_VERSION_MAJOR, RINGSPAN_VERSION_MINOR, RINGSPAN_VERSION_PATCH);
}

}  // namespace ringspan::cli

int main(int argc, char** argv) {
  std::signal(SIGXFSZ, SIG_IGN);  // a limit on file sizes becomes an error of the write
  return ringspan::cli::run_guarded([&] { return ringspan::cli::main_body(argc, argv); });
}
