#include "base/thread_pool.h"

#include <unistd.h>

#include <atomic>
#include <cfenv>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "base/check.h"

namespace ringspan {
namespace {

void relax() {  // the core, which another thread may share
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

using Body = FunctionRef<void(std::int64_t, int)>;

// How long the caller sleeps between two calls of progress while others finish.
constexpr std::chrono::microseconds kWaitStep{200};

// How long a thread looks for what it waits for before it sleeps: to sleep and to be woken takes as long as a short call.
// Others that could run on its core go first.
constexpr std::chrono::microseconds kLook{50};

template <typename Done>
bool look_for(const Done& done) {
  const auto end = std::chrono::steady_clock::now() + kLook;
  while (!done()) {
    if (std::chrono::steady_clock::now() >= end) return false;
    for (int i = 0; i < 16 && !done(); ++i) relax();
    std::this_thread::yield();
  }
  return true;
}

// Indices of one call, dealt to whoever asks next. Whoever was dealt one begins it: others may wait for it.
class Deal {
 public:
  void begin(std::int64_t count) {
    std::fegetenv(&floating_point_);
    count_ = count;
    next_.store(0, std::memory_order_release);
  }
  // Nobody begins another index.
  void end() { next_.store(count_, std::memory_order_relaxed); }

  // Another thread's part, which rounds, and flushes denormal numbers, as the caller does.
  void work(const Body& body, int thread) {
    std::fenv_t own;
    std::fegetenv(&own);
    std::fesetenv(&floating_point_);
    for (std::int64_t index = take(); index < count_; index = take()) body(index, thread);
    std::fesetenv(&own);
  }
  // The caller's part. Keeps what a body or progress threw, and deals nothing more then.
  void work_as_caller(const Body& body, FunctionRef<void()> progress, std::exception_ptr& failure) {
    try {
      for (std::int64_t index = take(); index < count_; index = take()) {
        body(index, 0);
        progress();
      }
    } catch (...) {
      failure = std::current_exception();
      end();
    }
  }

 private:
  std::int64_t take() { return next_.fetch_add(1, std::memory_order_acquire); }
  std::int64_t count_ = 0;
  std::atomic<std::int64_t> next_{0};
  std::fenv_t floating_point_{};  // of the caller
};

// A call on threads of the caller's, on its stack.
struct CallerJob {
  Body body;
  FunctionRef<void()> progress;
  int size;
  std::thread::id caller = std::this_thread::get_id();
  Deal deal{};
  std::atomic<int> brought{0};  // other threads
  std::atomic<int> inside{0};   // of which in the body loop
  std::exception_ptr failure{};

  void run() {
    if (std::this_thread::get_id() == caller) return run_as_caller();
    const int thread = ++brought;
    if (thread >= size) return;
    inside.fetch_add(1, std::memory_order_relaxed);
    deal.work(body, thread);
    inside.fetch_sub(1, std::memory_order_release);
  }
  void run_as_caller() {
    deal.work_as_caller(body, progress, failure);
    while (!failure && !look_for([&] { return inside.load(std::memory_order_acquire) == 0; })) {
      try {
        progress();
      } catch (...) {
        failure = std::current_exception();
      }
    }
  }
};

}  // namespace

// One job at a time. A worker joins a job only while it is open, and the caller waits only for workers that joined: one
// that the operating system has not scheduled yet delays nobody.
struct ThreadPool::State {
  const pid_t process = getpid();  // a forked one has none of the threads
  std::mutex mutex;
  std::condition_variable work_ready;  // a job was opened, or the pool stops
  std::condition_variable workers_left;
  bool stop = false;
  bool open = false;                  // workers may join
  std::atomic<std::uint64_t> job{0};  // tells a worker whether it has already taken part
  std::atomic<int> joined{0};         // workers inside the body loop
  std::optional<Body> body;           // of the open job
  Deal deal;
  std::vector<std::thread> threads;

  void work(int thread);
  void finish(FunctionRef<void()> progress, std::exception_ptr& failure);
  void start(int workers);
  void stop_all();
};

void ThreadPool::State::work(int thread) {
  std::uint64_t done = 0;
  for (;;) {
    look_for([&] { return job.load(std::memory_order_relaxed) != done; });
    std::unique_lock lock(mutex);
    work_ready.wait(lock, [&] { return stop || (open && job != done); });
    if (stop) return;
    done = job;
    ++joined;
    const Body run = *body;
    lock.unlock();
    deal.work(run, thread);
    lock.lock();
    if (--joined == 0) workers_left.notify_one();
  }
}

// Closes the job and waits for the workers that joined it. A failure of progress is kept until they have left, because the
// body they run lives on the caller's stack.
void ThreadPool::State::finish(FunctionRef<void()> progress, std::exception_ptr& failure) {
  std::unique_lock lock(mutex);
  open = false;
  lock.unlock();
  look_for([&] { return joined.load(std::memory_order_relaxed) == 0; });
  lock.lock();
  while (joined > 0) {
    if (failure) {
      workers_left.wait(lock, [&] { return joined == 0; });
      break;
    }
    if (workers_left.wait_for(lock, kWaitStep, [&] { return joined == 0; })) break;
    lock.unlock();
    try {
      progress();
    } catch (...) {
      failure = std::current_exception();
    }
    lock.lock();
  }
  body.reset();
}

void ThreadPool::State::stop_all() {
  {
    const std::lock_guard lock(mutex);
    stop = true;
  }
  work_ready.notify_all();
  for (std::thread& thread : threads) thread.join();
}

void ThreadPool::State::start(int workers) {
  threads.reserve(static_cast<std::size_t>(workers));
  try {
    for (int thread = 1; thread <= workers; ++thread) {
      threads.emplace_back([this, thread] { work(thread); });
    }
  } catch (...) {  // the system refused a thread: those that run must end before the state does
    stop_all();
    throw;
  }
}

ThreadPool::ThreadPool(int threads, CallerThreads caller) : size_(threads), caller_(caller), state_(std::make_unique<State>()) {
  RINGSPAN_CHECK(threads >= 1);
  if (caller_.run_on == nullptr) state_->start(threads - 1);
}

ThreadPool::~ThreadPool() {
  if (!forget_forked()) state_->stop_all();
}

// In a forked process neither can the threads be joined nor is the mutex known to be free: the state is left as it is.
bool ThreadPool::forget_forked() {
  if (state_->process == getpid()) return false;
  static_cast<void>(state_.release());
  return true;
}

void ThreadPool::run_on_caller(std::int64_t count, Body body, FunctionRef<void()> progress) {
  CallerJob job{body, progress, size_};
  job.deal.begin(count);
  caller_.run_on(caller_.context, [](void* argument) { static_cast<CallerJob*>(argument)->run(); }, &job, size_);
  if (!job.failure) job.deal.work_as_caller(body, progress, job.failure);  // what was left undone
  if (job.failure) std::rethrow_exception(job.failure);
}

void ThreadPool::parallel_for(std::int64_t count, Body body, FunctionRef<void()> progress) {
  if (count <= 0) return;
  if (count == 1 || size_ == 1) {
    for (std::int64_t index = 0; index < count; ++index) {
      if (index > 0) progress();
      body(index, 0);
    }
    return;
  }
  if (forget_forked()) {
    caller_ = {};  // whose threads stayed with the parent, too
    state_ = std::make_unique<State>();
    state_->start(size_ - 1);
  }
  if (caller_.run_on != nullptr) return run_on_caller(count, body, progress);
  State& state = *state_;
  {
    const std::lock_guard lock(state.mutex);
    RINGSPAN_CHECK(!state.open && state.joined == 0);
    state.body.emplace(body);
    state.deal.begin(count);
    state.open = true;
    ++state.job;
  }
  state.work_ready.notify_all();
  std::exception_ptr failure;
  state.deal.work_as_caller(body, progress, failure);
  state.finish(progress, failure);
  if (failure) std::rethrow_exception(failure);
}

}  // namespace ringspan
