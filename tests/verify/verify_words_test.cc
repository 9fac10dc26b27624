// The line of a verify case: it round-trips, and its errors name the word.
#include <gtest/gtest.h>

#include "ringspan/error.h"
#include "verify_case.h"

namespace ringspan::cli {
namespace {

std::string error_of(const std::string& words) {
  try {
    parse_case("nq=4 h=1 d=8 " + words);
  } catch (const InvalidArgument& error) {
    return error.what();
  }
  return "no error";
}

TEST(VerifyWords, DefaultsAreNotPrinted) { EXPECT_EQ(print_case(parse_case("nq=4 h=1 d=8")), "nq=4 h=1 d=8"); }

// Each word changes the case, and what is printed parses to the same case.
TEST(VerifyWords, EveryWordRoundTrips) {
  for (const char* word : {"strategy=ring", "bucket=none", "bucket=17", "computing=2", "threads=3", "keep_o=0", "backward=0",
                           "dlse=1", "gain=2.5", "data=9", "kernel=reference", "device=fake", "pattern=causal"}) {
    const std::string line = std::string("nq=4 h=1 d=8 ") + word;
    EXPECT_EQ(print_case(parse_case(line)), line);
  }
}

TEST(VerifyWords, RandomCasesRoundTrip) {
  for (std::uint64_t index = 0; index < 300; ++index) {
    const VerifyCase drawn = without_idle_words(oracle::draw_case(3, index));
    const VerifyCase parsed = parse_case(print_case(drawn));
    EXPECT_EQ(print_case(parsed), print_case(drawn));
    EXPECT_EQ(parsed.options.strategy, drawn.options.strategy);
    EXPECT_EQ(parsed.options.bucket_rows, drawn.options.bucket_rows);
    EXPECT_EQ(parsed.options.computing_ranks, drawn.options.computing_ranks);
    EXPECT_EQ(parsed.options.threads, drawn.options.threads);
    EXPECT_EQ(parsed.options.keep_o_float32, drawn.options.keep_o_float32);
    EXPECT_EQ(parsed.options.backward, drawn.options.backward);
    EXPECT_EQ(parsed.dlse, drawn.dlse);
    EXPECT_EQ(parsed.gain, drawn.gain);
    EXPECT_EQ(parsed.data_seed, drawn.data_seed);
    EXPECT_EQ(parsed.fake_device, drawn.fake_device);
  }
}

TEST(VerifyWords, ErrorsNameTheWord) {
  EXPECT_EQ(error_of("speed=9"), "unknown word speed=9");
  EXPECT_EQ(error_of("strategy=wrong").rfind("strategy: ", 0), 0U);
  EXPECT_EQ(error_of("bucket=0"), "bucket=0: expected a whole number from 1 up");
  EXPECT_EQ(error_of("bucket=many"), "bucket=many: expected a whole number");
  EXPECT_EQ(error_of("computing=-1"), "computing=-1: expected a whole number from 0 up");
  EXPECT_EQ(error_of("threads=0"), "threads=0: expected a whole number from 1 up");
  EXPECT_EQ(error_of("threads=100000"), "threads=100000: expected a number up to 65536");
  EXPECT_EQ(error_of("keep_o=yes"), "keep_o=yes: expected 0 or 1");
  EXPECT_EQ(error_of("data=-1"), "data=-1: expected a whole number from 0 up");
  EXPECT_EQ(error_of("gain=much"), "gain=much: expected a number");
  for (const std::string value : {"inf", "-inf", "nan"}) {
    EXPECT_EQ(error_of("gain=" + value), "gain=" + value + ": expected a finite number");
  }
  EXPECT_EQ(error_of("device=gpu"), "device=gpu: expected cpu or fake");
  EXPECT_EQ(error_of("kernel="), "kernel=: expected the name of a kernel, such as reference");
}

TEST(VerifyWords, ThatWouldChangeNothingAreRefused) {
  EXPECT_EQ(error_of("seed=5"), "seed=5 is for dropout, but dropout is 0");
  EXPECT_EQ(error_of("seed=5 dropout=0"), "seed=5 is for dropout, but dropout is 0");
  EXPECT_EQ(error_of("seed=5 dropout=0.1"), "no error");
  EXPECT_EQ(error_of("dlse=1 backward=0"), "dlse=1 is for the backward pass, but backward is 0");
  EXPECT_EQ(error_of("dlse=0 backward=0"), "no error");
}

}  // namespace
}  // namespace ringspan::cli
