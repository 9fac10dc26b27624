// ringspan doctor: what this machine has, what of it will be used and why, and what a user should know about it.
#include <fmt/format.h>

#include <CLI/App.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <vector>

#include "command.h"
#include "kernels/registry.h"
#include "machine.h"
#include "ringspan/device.h"
#include "ringspan/error.h"
#include "ringspan/tuning.h"
#include "text.h"

namespace ringspan::cli {
namespace {

using kernels::AttendKernel;

constexpr DType kDtypes[] = {DType::float32, DType::bfloat16, DType::float16};

// What runs where no kernel is named.
struct Choice {
  DType dtype;
  std::string_view forward, backward;
};

struct Diagnosis {
  Machine machine;
  std::vector<Choice> choices;
  std::vector<std::string> devices;
  std::vector<std::string> advice;
};

std::string memory_text(std::int64_t bytes) { return bytes_text(static_cast<double>(bytes)); }

std::vector<Choice> choices() {
  std::vector<Choice> chosen;
  for (const DType dtype : kDtypes) {
    kernels::AttendShape shape;
    shape.dtype = dtype;
    shape.head_dim = shape.head_dim_v = 64;
    chosen.push_back({dtype, select_attend(shape).name, select_attend_backward(shape).name});
  }
  return chosen;
}

std::vector<std::string> advice(const Machine& machine) {
  std::vector<std::string> lines;
  if (machine.usable < machine.processors) {
    lines.push_back(
        fmt::format("this process may use {} of {} processors (its affinity: taskset, a job); commands start {} by default",
                    machine.usable, machine.processors, counted(machine.usable, "thread")));
  }
  if (machine.cores && *machine.cores < machine.usable) {
    lines.push_back(
        fmt::format("{} usable processors lie on {} cores: kernels fill a core with one thread each, so --threads {} is enough",
                    machine.usable, *machine.cores, *machine.cores));
  }
  if (machine.quota && *machine.quota < machine.usable) {
    lines.push_back(
        fmt::format("the control group (a container, a job) allows the time of {:.1f} processors, {} are visible: more threads "
                    "than that wait for each other",
                    *machine.quota, machine.usable));
  }
  if (machine.memory_limit && *machine.memory_limit < machine.available) {
    lines.push_back(
        fmt::format("the control group (a container, a job) may use {}, less than the {} that are free: pass it as --memory",
                    memory_text(*machine.memory_limit), memory_text(machine.available)));
  }
  if (std::none_of(kernels::implementations().begin(), kernels::implementations().end(), [](const auto& implementation) {
        return implementation.name != "portable" && implementation.name != "reference" && implementation.machine_has();
      })) {
    lines.emplace_back("no vector instructions that kernels are written for: the portable ones run, several times slower");
  }
  try {  // which every command with a problem reads
    with_tuned_sizes(Problem{}, PlanOptions{});
  } catch (const Error& error) {
    lines.emplace_back(error.what());
  }
  return lines;
}

Diagnosis diagnose() {
  Diagnosis diagnosis{read_machine(), choices(), device_report(), {}};
  diagnosis.advice = advice(diagnosis.machine);
  return diagnosis;
}

void line(std::string_view name, const std::string& value) { fmt::print("  {:<14}{}\n", name, value); }

void print_machine(const Machine& machine) {
  fmt::print("machine\n");
  line("processor", machine.processor.empty() ? machine.architecture : machine.processor + ", " + machine.architecture);
  std::string processors = fmt::format("{} usable of {}", machine.usable, machine.processors);
  if (machine.cores) processors += fmt::format(", on {} {}", *machine.cores, *machine.cores == 1 ? "core" : "cores");
  line("processors", processors);
  std::string caches;
  for (const Cache& cache : machine.caches) {
    if (cache.type == "Instruction") continue;
    caches += fmt::format("{}L{} {}", caches.empty() ? "" : ", ", cache.level, memory_text(cache.bytes));
  }
  if (!caches.empty()) line("caches", caches);
  const std::string limit = machine.memory_limit ? fmt::format(", limited to {}", memory_text(*machine.memory_limit)) : "";
  line("memory", fmt::format("{}, {} available{}", memory_text(machine.memory), memory_text(machine.available), limit));
  line("system", machine.system);
}

void print_implementations() {
  fmt::print("\nimplementations and what they need, best first\n");
  for (const kernels::Implementation& implementation : kernels::implementations()) {
    const bool here = implementation.machine_has();
    std::string text = std::string(implementation.needs);
    if (!implementation.note.empty()) text += fmt::format("; {}", implementation.note);
    fmt::print("  {:<14}{:<12}{}\n", implementation.name, here ? "runs here" : "not here", text);
  }
}

int print_text(const Diagnosis& diagnosis) {
  fmt::print("ringspan {}\n\n", program_version());
  print_machine(diagnosis.machine);
  print_implementations();
  fmt::print("\nkernels that run unless --kernel names others\n");
  for (const Choice& choice : diagnosis.choices) {
    line(to_string(choice.dtype), fmt::format("{}, {}", choice.forward, choice.backward));
  }
  fmt::print("\nranks\n");
  line("threads", "of this process");
  line("processes", "forked, joined by sockets of this machine");
  line("callbacks", "whatever a C struct of functions reaches: torch.distributed from Python, your own from C");
  fmt::print("\ndevices\n");
  for (const std::string& text : diagnosis.devices) fmt::print("  {}\n", text);
  fmt::print("\nadvice\n");
  for (const std::string& text : diagnosis.advice) fmt::print("  {}\n", text);
  if (diagnosis.advice.empty()) fmt::print("  none: nothing here needs your attention\n");
  return kOk;
}

template <typename T>
nlohmann::ordered_json or_null(const std::optional<T>& value) {
  return value ? nlohmann::ordered_json(*value) : nlohmann::ordered_json();
}

int print_json(const Diagnosis& diagnosis) {
  const Machine& machine = diagnosis.machine;
  nlohmann::ordered_json json{{"version", 1}, {"library", program_version()}};
  json["machine"] = {{"processor", machine.processor},
                     {"architecture", machine.architecture},
                     {"system", machine.system},
                     {"processors", machine.processors},
                     {"usable", machine.usable},
                     {"cores", or_null(machine.cores)},
                     {"quota", or_null(machine.quota)},
                     {"memory_bytes", machine.memory},
                     {"available_bytes", machine.available},
                     {"memory_limit_bytes", or_null(machine.memory_limit)}};
  json["machine"]["caches"] = nlohmann::ordered_json::array();
  for (const Cache& cache : machine.caches) {
    json["machine"]["caches"].push_back({{"level", cache.level}, {"type", cache.type}, {"bytes", cache.bytes}});
  }
  json["implementations"] = nlohmann::ordered_json::array();
  for (const kernels::Implementation& implementation : kernels::implementations()) {
    json["implementations"].push_back({{"name", implementation.name},
                                       {"needs", implementation.needs},
                                       {"note", implementation.note},
                                       {"here", implementation.machine_has()}});
  }
  for (const Choice& choice : diagnosis.choices) {
    json["kernels"][std::string(to_string(choice.dtype))] = {{"attend", choice.forward}, {"attend_backward", choice.backward}};
  }
  json["devices"] = diagnosis.devices;
  json["advice"] = diagnosis.advice;
  fmt::print("{}\n", json_text(json));
  return kOk;
}

}  // namespace

Body setup_doctor(CLI::App& app) {
  auto json = std::make_shared<bool>(false);
  app.add_flag("--json", *json, "print JSON");
  return [json] {
    const Diagnosis diagnosis = diagnose();
    return *json ? print_json(diagnosis) : print_text(diagnosis);
  };
}

}  // namespace ringspan::cli
