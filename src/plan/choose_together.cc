#include "plan/choose_together.h"

#include <unistd.h>

#include <future>
#include <mutex>
#include <optional>
#include <utility>

namespace ringspan::internal {
namespace {

struct Asked {
  Asked(Problem p, PlanOptions o) : problem(std::move(p)), options(std::move(o)) {}

  Problem problem;
  PlanOptions options;
  pid_t process = getpid();  // a forked one has not the thread that chooses
  std::promise<std::optional<Choice>> promise;
  std::shared_future<std::optional<Choice>> choice = promise.get_future().share();  // empty where choosing threw
};

std::mutex mutex;
std::weak_ptr<Asked> latest;

}  // namespace

std::shared_ptr<const Choice> choose_together(const Problem& problem, const PlanOptions& options) {
  std::shared_ptr<Asked> asked;
  bool first = false;
  {
    const std::lock_guard lock(mutex);
    asked = latest.lock();
    first = !asked || asked->process != getpid() || asked->problem != problem || asked->options != options;
    if (first) latest = asked = std::make_shared<Asked>(problem, options);
  }
  if (first) {
    try {
      asked->promise.set_value(choose(asked->problem, asked->options));
    } catch (...) {
      asked->promise.set_value(std::nullopt);
      throw;
    }
  }
  const std::optional<Choice>& choice = asked->choice.get();
  if (!choice) return std::make_shared<const Choice>(choose(problem, options));  // throws the same
  return {std::move(asked), &*choice};
}

}  // namespace ringspan::internal
