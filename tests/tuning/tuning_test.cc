// The file of `ringspan tune`: what is written is read, what is not for this machine is not used, what is broken is refused.
#include "ringspan/tuning.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <random>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "api/tune_file.h"
#include "ringspan/attention.h"
#include "ringspan/error.h"
#include "ringspan/ringspan_c.h"
#include "ringspan/transports.h"

namespace ringspan {
namespace {

using internal::prepare_tune_file;
using internal::read_tune_file;
using internal::this_machine;
using internal::TuneEntry;
using internal::TuneMachine;
using internal::write_tune_entry;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

// Sets a variable of the environment (or takes it away) for the lifetime of the object.
class Variable {
 public:
  Variable(const char* name, const std::optional<std::string>& value) : name_(name) {
    if (const char* before = std::getenv(name)) before_ = before;
    set(value);
  }
  ~Variable() { set(before_); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  void set(const std::optional<std::string>& value) const { value ? ::setenv(name_, value->c_str(), 1) : ::unsetenv(name_); }
  const char* name_;
  std::optional<std::string> before_;
};

class TuneFile : public ::testing::Test {
 protected:
  TuneFile()
      : folder_(::testing::TempDir() + "ringspan-tune-" + std::to_string(::getpid())), path_(folder_ + "/deep/tune.json") {
    std::filesystem::remove_all(folder_);
  }
  ~TuneFile() override { std::filesystem::remove_all(folder_); }

  void write(const std::string& text) const {
    std::filesystem::create_directories(std::filesystem::path(path_).parent_path());
    std::ofstream(path_) << text;
  }
  std::string text() const {
    std::stringstream text;
    text << std::ifstream(path_).rdbuf();
    return text.str();
  }
  std::vector<std::string> names() const {  // of the files beside it, sorted
    std::vector<std::string> names;
    for (const auto& file : std::filesystem::directory_iterator(std::filesystem::path(path_).parent_path())) {
      names.push_back(file.path().filename());
    }
    std::sort(names.begin(), names.end());
    return names;
  }
  std::string refusal(const std::string& text) const {
    write(text);
    try {
      read_tune_file(path_, this_machine());
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "read";
  }

  std::string folder_, path_;
};

TuneEntry entry(int head_dim = 64) {
  return {DType::float32, head_dim,  "2026-11-21", "attend_f32_portable", "attend_backward_f32_portable",
          {48, 128},      {66, 240}, 512};
}

Problem problem(int head_dim = 64, int ranks = 1) {
  Problem p;
  p.tokens_q = p.tokens_k = 2048;
  p.heads = p.kv_heads = 2;
  p.head_dim = p.head_dim_v = head_dim;
  p.ranks = ranks;
  return p;
}

PlanOptions portable() {
  PlanOptions options;
  options.attend_kernel = options.attend_backward_kernel = "portable";
  return options;
}

TEST_F(TuneFile, WhatIsWrittenIsRead) {
  EXPECT_THAT(read_tune_file(path_, this_machine()), IsEmpty());
  write_tune_entry(path_, this_machine(), entry(64));
  write_tune_entry(path_, this_machine(), entry(128));
  TuneEntry newer = entry(64);
  newer.date = "2026-12-01", newer.attend_tile = {}, newer.bucket_rows = 0;
  write_tune_entry(path_, this_machine(), newer);
  EXPECT_THAT(read_tune_file(path_, this_machine()), ElementsAre(entry(128), newer));
}

// What was read once is read again only when the file is another one.
TEST_F(TuneFile, WhatIsKnownIsReadAgainWhenItChanges) {
  const auto minute_ago = [&] {
    std::filesystem::last_write_time(path_, std::filesystem::file_time_type::clock::now() - std::chrono::minutes(1));
  };
  write_tune_entry(path_, this_machine(), entry(64));
  minute_ago();
  for (int i = 0; i < 2; ++i) EXPECT_THAT(read_tune_file(path_, this_machine()), ElementsAre(entry(64)));
  TuneEntry newer = entry(64);
  newer.date = "2026-12-01";
  write_tune_entry(path_, this_machine(), newer);
  EXPECT_THAT(read_tune_file(path_, this_machine()), ElementsAre(newer));
  minute_ago();
  EXPECT_THAT(read_tune_file(path_, this_machine()), ElementsAre(newer));
  EXPECT_THAT(refusal("{"), HasSubstr("is not JSON"));
  std::filesystem::remove(path_);
  EXPECT_THAT(read_tune_file(path_, this_machine()), IsEmpty());
}

TEST_F(TuneFile, MachinesKeepTheirOwn) {
  TuneMachine other = this_machine();
  other.processor = "another";
  TuneMachine older = this_machine();
  older.version = "0.0.1";
  for (const TuneMachine& machine : {other, older, this_machine()}) {
    write_tune_entry(path_, machine, entry(machine.processor == "another" ? 32 : 64));
  }
  EXPECT_THAT(read_tune_file(path_, other), ElementsAre(entry(32)));
  EXPECT_THAT(read_tune_file(path_, this_machine()), ElementsAre(entry(64)));
  other.instructions += " more";
  EXPECT_THAT(read_tune_file(path_, other), IsEmpty());
}

TEST_F(TuneFile, ThisMachineHasANameAndKernels) {
  EXPECT_FALSE(this_machine().processor.empty());
  EXPECT_THAT(this_machine().instructions, HasSubstr("portable"));
  EXPECT_EQ(this_machine(), this_machine());
}

// Whoever reads meanwhile sees the old file or the new one, and nothing is left behind.
TEST_F(TuneFile, IsReplacedAsAWhole) {
  write_tune_entry(path_, this_machine(), entry(64));
  std::ifstream reader(path_);
  const std::string before = text();
  write_tune_entry(path_, this_machine(), entry(128));
  std::stringstream seen;
  seen << reader.rdbuf();
  EXPECT_EQ(seen.str(), before);
  EXPECT_NE(text(), before);
  EXPECT_THAT(names(), ElementsAre("tune.json", "tune.json.lock"));
}

TEST_F(TuneFile, WritersAtTheSameTimeKeepEachOthersEntries) {
  constexpr int kThreads = 4, kEach = 16;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      for (int i = 0; i < kEach; ++i) write_tune_entry(path_, this_machine(), entry(1 + t * kEach + i));
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(read_tune_file(path_, this_machine()).size(), std::size_t{kThreads * kEach});
}

TEST_F(TuneFile, ALinkStaysAndWhatItPointsToIsWritten) {
  std::filesystem::create_directories(folder_ + "/deep");
  std::filesystem::create_symlink("deeper/tune.json", path_);  // is not there yet, nor is its folder
  for (const int head_dim : {64, 128}) write_tune_entry(path_, this_machine(), entry(head_dim));
  EXPECT_TRUE(std::filesystem::is_symlink(path_));
  EXPECT_THAT(read_tune_file(folder_ + "/deep/deeper/tune.json", this_machine()), ElementsAre(entry(64), entry(128)));
  EXPECT_THAT(names(), ElementsAre("deeper", "tune.json"));
}

TEST_F(TuneFile, KeepsItsPermissions) {
  write_tune_entry(path_, this_machine(), entry(64));
  ASSERT_EQ(::chmod(path_.c_str(), 0600), 0);
  write_tune_entry(path_, this_machine(), entry(128));
  EXPECT_EQ(std::filesystem::status(path_).permissions(), std::filesystem::perms(0600));
}

TEST_F(TuneFile, IsPreparedBeforeThereIsAnythingToWrite) {
  prepare_tune_file(path_);
  EXPECT_THAT(names(), ElementsAre("tune.json.lock"));
  write_tune_entry(path_, this_machine(), entry(64));
  const std::string before = text();
  prepare_tune_file(path_);
  EXPECT_EQ(text(), before);
  EXPECT_THROW(prepare_tune_file(path_ + "/tune.json"), Error);
  write("broken");
  EXPECT_THROW(prepare_tune_file(path_), InvalidArgument);
}

TEST_F(TuneFile, WhatCannotBeWrittenSaysSo) {
  write("");
  const std::string below = path_ + "/tune.json";  // a file where a folder should be
  try {
    write_tune_entry(below, this_machine(), entry());
    FAIL();
  } catch (const Error& error) {
    EXPECT_EQ(std::string(error.what()), "tune file " + below + ": cannot be written: Not a directory");
  }
  EXPECT_EQ(text(), "");
}

TEST_F(TuneFile, WhatIsBrokenIsRefusedByName) {
  const std::string hint = "; remove it and run `ringspan tune`, or set RINGSPAN_TUNE_FILE= to do without";
  const auto says = [&](const std::string& text, const std::string& why) {
    EXPECT_EQ(refusal(text), "tune file " + path_ + ": " + why + hint);
  };
  says("", "is not JSON");
  says("{\"schema\": 1, \"machines\": [", "is not JSON");
  says("[]", "cannot use at() with array");
  says("null", "cannot use at() with null");
  says("{\"schema\": 2}", "has schema 2, this version knows 1");
  says("{\"schema\": 1}", "key 'machines' not found");
  write_tune_entry(folder_ + "/good", this_machine(), entry());
  std::stringstream stream;
  stream << std::ifstream(folder_ + "/good").rdbuf();
  const std::string good = stream.str();
  EXPECT_EQ(refusal(good), "read");
  says(good + '\0' + "more", "is not JSON: it holds a NUL byte");
  const auto with = [&](const std::string& from, const std::string& to) {
    std::string text = good;
    return text.replace(text.find(from), from.size(), to);
  };
  says(with("\"tile_queries\": 48", "\"tile_queries\": -48"), "tile_queries (-48) must be in [0, 1048576]");
  says(with("\"tile_queries\": 48", "\"tile_queries\": 0"), "a tile of 0 x 128 must have queries and keys, or neither");
  EXPECT_THAT(refusal(with("\"float32\"", "\"float8\"")), HasSubstr("float8"));
  says(with("\"bucket_rows\": 512", "\"bucket_rows\": \"512\""), "bucket_rows must be a whole number, not string");
  says(with("\"tile_keys\": 128", "\"tile_keys\": 128.7"), "tile_keys must be a whole number, not 128.7");
  says(with("\"head_dim\": 64", "\"head_dim\": 64.9"), "head_dim must be a whole number, not 64.9");
  says(with("\"schema\": 1", "\"schema\": 1.9"), "schema must be a whole number, not 1.9");
  says(with("\"schema\": 1", "\"schema\": 18446744073709551615"),
       "schema must be a whole number of at most 9223372036854775807, not 18446744073709551615");
  says("{\"schema\": 1, \"machines\": null}", "machines must be a list, not null");
  says("{\"schema\": 1, \"machines\": {}}", "machines must be a list, not object");
  says(good.substr(0, good.find("\"entries\"")) + "\"entries\": null}]}", "entries must be a list, not null");
  // Also where the mistake is another machine's.
  std::string elsewhere = with("\"processor\": \"", "\"processor\": \"not ");
  EXPECT_EQ(refusal(elsewhere), "read");
  elsewhere.replace(elsewhere.find("\"tile_queries\": 48"), 18, "\"tile_queries\": -48");
  says(elsewhere, "tile_queries (-48) must be in [0, 1048576]");
  try {
    write_tune_entry(path_, this_machine(), entry());
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(), HasSubstr(path_));
  }
}

TEST_F(TuneFile, AFolderIsRefused) {
  std::filesystem::create_directories(path_);
  EXPECT_THROW(read_tune_file(path_, this_machine()), InvalidArgument);
}

TEST(TuningFile, WhereItIs) {
  const Variable home("HOME", "/home/a");
  {
    const Variable file("RINGSPAN_TUNE_FILE", std::nullopt), cache("XDG_CACHE_HOME", "/cache");
    EXPECT_EQ(tuning_file(), "/cache/ringspan/tune.json");
    const Variable relative("XDG_CACHE_HOME", "cache");
    EXPECT_EQ(tuning_file(), "/home/a/.cache/ringspan/tune.json");
    const Variable nowhere("HOME", std::nullopt);
    EXPECT_EQ(tuning_file(), "");
  }
  const Variable file("RINGSPAN_TUNE_FILE", "mine.json");
  EXPECT_EQ(tuning_file(), "mine.json");
  const Variable none("RINGSPAN_TUNE_FILE", "");
  EXPECT_EQ(tuning_file(), "");
}

TEST_F(TuneFile, FillsSizesThatAreLeftOpen) {
  const Variable file("RINGSPAN_TUNE_FILE", path_);
  EXPECT_EQ(with_tuned_sizes(problem(), portable()).tuned, TunedSizes{});
  write_tune_entry(path_, this_machine(), entry());
  const PlanOptions options = with_tuned_sizes(problem(), portable());
  EXPECT_EQ(options.tuned, (TunedSizes{{48, 128}, {66, 240}, 512, path_ + ", 2026-11-21"}));
  const Plan plan = make_plan(problem(64, 2), options, 0);
  EXPECT_EQ(plan.kernel(Pass::forward).tile, (Tile{48, 128}));
  EXPECT_EQ(plan.kernel(Pass::backward).tile_source, SizeSource::tuned);
  EXPECT_THAT(plan.to_string(), HasSubstr("tiles of 48 x 128 (tuned: " + path_ + ", 2026-11-21)"));

  TuneEntry other = entry();  // of other kernels, later
  other.attend_kernel = other.attend_backward_kernel = "other", other.date = "2026-11-22";
  write_tune_entry(path_, this_machine(), other);
  EXPECT_EQ(with_tuned_sizes(problem(), portable()).tuned.source, path_ + ", 2026-11-21");

  // Sizes that are given win; kernels, dtypes and head dimensions that were not measured have their own.
  PlanOptions given = options;
  given.attend_tile = {96, 64};
  EXPECT_EQ(make_plan(problem(), with_tuned_sizes(problem(), given), 0).kernel(Pass::forward).tile_source, SizeSource::given);
  PlanOptions mixed = portable();
  mixed.attend_kernel = "reference";
  EXPECT_EQ(with_tuned_sizes(problem(), mixed).tuned, (TunedSizes{{}, {66, 240}, 0, path_ + ", 2026-11-21"}));
  EXPECT_EQ(with_tuned_sizes(problem(128), portable()).tuned, TunedSizes{});
  Problem half = problem();
  half.dtype = DType::bfloat16;
  EXPECT_EQ(with_tuned_sizes(half, portable()).tuned, TunedSizes{});
  const Variable none("RINGSPAN_TUNE_FILE", "");
  EXPECT_EQ(with_tuned_sizes(problem(), portable()).tuned, TunedSizes{});
}

TEST_F(TuneFile, CountsOnTheCpuHoweverThatIsNamed) {
  const Variable file("RINGSPAN_TUNE_FILE", path_);
  write_tune_entry(path_, this_machine(), entry());
  const auto world = make_thread_world(1);
  for (const char* device : {"cpu", ""}) {
    const Attention attention(problem(), portable(), *world[0], {.device = device});
    EXPECT_EQ(attention.plan().kernel(Pass::forward).tile, (Tile{48, 128})) << device;
  }
}

TEST_F(TuneFile, SizesThatTheKernelDoesNotTakeAreRefusedByName) {
  const Variable file("RINGSPAN_TUNE_FILE", path_);
  TuneEntry bad = entry();
  bad.attend_tile = {50, 128};
  write_tune_entry(path_, this_machine(), bad);
  try {
    with_tuned_sizes(problem(), portable());
    FAIL();
  } catch (const InvalidArgument& error) {
    EXPECT_THAT(error.what(), StartsWith("tune file " + path_ + ": the queries of a tile (50) must be 0 or a multiple of 6"));
    EXPECT_THAT(error.what(), HasSubstr("RINGSPAN_TUNE_FILE="));
  }
}

// Ranks of unlike machines may have unlike tiles: what travels is the same, and results are equal within rounding.
TEST(Tiles, MayDifferBetweenRanks) {
  constexpr std::int64_t kTokens = 300, kHeads = 2, kDim = 64, kRow = kHeads * kDim;
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  std::vector<float> q(kTokens * kRow), k(q.size()), v(q.size());
  for (std::vector<float>* list : {&q, &k, &v}) {
    for (float& x : *list) x = normal(random);
  }
  const auto run = [&](int ranks, const std::vector<Tile>& tiles) {
    Problem p = problem(kDim, ranks);
    p.tokens_q = p.tokens_k = kTokens;
    p.pattern = Pattern::parse("causal");
    std::vector<float> o(q.size());
    run_thread_ranks(ranks, [&](Communicator& communicator) {
      const auto rank = static_cast<std::size_t>(communicator.rank());
      PlanOptions options = portable();
      options.strategy = ranks > 1 ? Strategy::ring : Strategy::local;
      options.bucket_rows = PlanOptions::kBucketNone;
      options.attend_tile = tiles[rank];
      Attention attention(p, options, communicator);
      const std::int64_t first = static_cast<std::int64_t>(rank) * kTokens / ranks * kRow;
      std::vector<float> lse(kTokens / ranks * kHeads);
      const auto in = [&](const std::vector<float>& list) { return ConstTensor{list.data() + first, 0, kRow, kDim}; };
      ForwardTensors tensors;
      tensors.q = in(q), tensors.k = in(k), tensors.v = in(v);
      tensors.o = {o.data() + first, 0, kRow, kDim};
      tensors.lse = {lse.data(), 0, 1, kTokens / ranks};
      attention.forward(tensors);
    });
    return o;
  };
  const std::vector<float> one = run(1, {{}}), three = run(3, {{48, 64}, {}, {192, 128}});
  double most = 0;
  for (std::size_t i = 0; i < one.size(); ++i) most = std::max(most, static_cast<double>(std::abs(one[i] - three[i])));
  EXPECT_LT(most, 1e-5);
  EXPECT_GT(most, 0.0) << "sums in another order";
}

// What is wrong with the problem is the plan's to say.
TEST_F(TuneFile, AnInvalidProblemIsLeftAlone) {
  const Variable file("RINGSPAN_TUNE_FILE", path_);
  write_tune_entry(path_, this_machine(), entry());
  Problem p = problem();
  p.kv_heads = 0;
  EXPECT_EQ(with_tuned_sizes(p, portable()).tuned, TunedSizes{});
}

TEST_F(TuneFile, AttentionAndCPlanWithIt) {
  const Variable file("RINGSPAN_TUNE_FILE", path_);
  write_tune_entry(path_, this_machine(), entry());
  const auto world = make_thread_world(1);
  const Attention attention(problem(), portable(), *world[0]);
  EXPECT_EQ(attention.plan().kernel(Pass::forward).tile_source, SizeSource::tuned);

  ringspan_problem p = {};
  p.struct_size = sizeof p;
  p.tokens_q = p.tokens_k = 2048, p.heads = 2, p.head_dim = 64;
  ringspan_options options = {};
  options.struct_size = sizeof options;
  options.attend_kernel = options.attend_backward_kernel = "portable";
  options.attend_backward_tile_queries = 36, options.attend_backward_tile_keys = 64;
  const auto text_of = [&] {
    ringspan_plan* plan = nullptr;
    const char* text = nullptr;
    EXPECT_EQ(ringspan_plan_create(&p, &options, 0, &plan), RINGSPAN_OK) << ringspan_last_error();
    EXPECT_EQ(ringspan_plan_text(plan, &text), RINGSPAN_OK);
    const std::string copy = text;
    ringspan_plan_destroy(plan);
    return copy;
  };
  EXPECT_THAT(text_of(), HasSubstr("attend_f32_portable, tiles of 48 x 128 (tuned: "));
  EXPECT_THAT(text_of(), HasSubstr("attend_backward_f32_portable, tiles of 36 x 64 (given)"));
  options.struct_size = offsetof(ringspan_options, attend_tile_queries);  // of a program from before there were tiles
  EXPECT_THAT(text_of(), HasSubstr("attend_backward_f32_portable, tiles of 66 x 240 (tuned: "));

  write("broken");
  EXPECT_THROW(Attention(problem(), portable(), *world[0]), InvalidArgument);
  ringspan_plan* plan = nullptr;
  EXPECT_EQ(ringspan_plan_create(&p, &options, 0, &plan), RINGSPAN_INVALID_ARGUMENT);
  EXPECT_THAT(ringspan_last_error(), HasSubstr("is not JSON"));
}

}  // namespace
}  // namespace ringspan
