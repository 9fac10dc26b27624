#include "io/problem_line.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <charconv>
#include <functional>
#include <limits>
#include <map>
#include <set>

#include "ringspan/error.h"

namespace ringspan::io {
namespace {

[[noreturn]] void fail(std::string_view key, std::string_view value, std::string_view expected) {
  throw InvalidArgument(fmt::format("{}={}: expected {}", key, value, expected));
}

template <typename Integer>
Integer parse_bounded(std::string_view key, std::string_view value) {
  Integer number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error == std::errc::result_out_of_range) {
    fail(key, value, fmt::format("a number up to {}", std::numeric_limits<Integer>::max()));
  }
  if (error != std::errc() || end != value.data() + value.size()) fail(key, value, "a whole number");
  return number;
}

template <typename Integer>
std::vector<Integer> parse_list(std::string_view key, std::string_view value) {
  std::vector<Integer> numbers;
  for (std::size_t begin = 0; begin <= value.size();) {
    const std::size_t end = std::min(value.find(',', begin), value.size());
    const std::string_view entry = value.substr(begin, end - begin);
    try {
      numbers.push_back(parse_bounded<Integer>(key, entry));
    } catch (const InvalidArgument&) {
      throw InvalidArgument(fmt::format("{} must be whole numbers up to {} separated by commas, but entry {} is '{}'", key,
                                        std::numeric_limits<Integer>::max(), numbers.size(), entry));
    }
    begin = end + 1;
  }
  return numbers;
}

// Runs a parser of its own error messages, which do not know the word.
template <typename Parse>
auto with_key(std::string_view key, Parse parse) {
  try {
    return parse();
  } catch (const InvalidArgument& error) {
    throw InvalidArgument(fmt::format("{}: {}", key, error.what()));
  }
}

using Setter = std::function<void(Problem&, std::string_view key, std::string_view value)>;

const std::map<std::string_view, Setter>& setters() {
  using View = std::string_view;
  static const std::map<View, Setter> table = {
      {"b", [](Problem& p, View key, View value) { p.batch = parse_integer(key, value); }},
      {"nq", [](Problem& p, View key, View value) { p.tokens_q = parse_integer(key, value); }},
      {"nk", [](Problem& p, View key, View value) { p.tokens_k = parse_integer(key, value); }},
      {"h", [](Problem& p, View key, View value) { p.heads = parse_bounded<int>(key, value); }},
      {"hkv", [](Problem& p, View key, View value) { p.kv_heads = parse_bounded<int>(key, value); }},
      {"d", [](Problem& p, View key, View value) { p.head_dim = parse_bounded<int>(key, value); }},
      {"dv", [](Problem& p, View key, View value) { p.head_dim_v = parse_bounded<int>(key, value); }},
      {"dtype", [](Problem& p, View key, View value) { p.dtype = with_key(key, [&] { return parse_dtype(value); }); }},
      {"pattern", [](Problem& p, View, View value) { p.pattern = Pattern::parse(value); }},  // its errors begin with the word
      {"cu_q", [](Problem& p, View key, View value) { p.cu_seqlens_q = parse_list<std::int32_t>(key, value); }},
      {"cu_k", [](Problem& p, View key, View value) { p.cu_seqlens_k = parse_list<std::int32_t>(key, value); }},
      {"len_q", [](Problem& p, View key, View value) { p.lengths_q = parse_list<std::int64_t>(key, value); }},
      {"len_k", [](Problem& p, View key, View value) { p.lengths_k = parse_list<std::int64_t>(key, value); }},
      {"start_k", [](Problem& p, View key, View value) { p.starts_k = parse_list<std::int64_t>(key, value); }},
      {"scale", [](Problem& p, View key, View value) { p.scale = parse_float(key, value); }},
      {"softcap", [](Problem& p, View key, View value) { p.softcap = parse_float(key, value); }},
      {"alibi", [](Problem& p, View key, View value) { p.alibi = parse_flag(key, value); }},
      {"sinks", [](Problem& p, View key, View value) { p.sinks = parse_flag(key, value); }},
      {"dropout", [](Problem& p, View key, View value) { p.dropout = parse_float(key, value); }},
      {"seed", [](Problem& p, View key, View value) { p.seed = parse_bounded<std::uint64_t>(key, value); }},
      {"p", [](Problem& p, View key, View value) { p.ranks = parse_bounded<int>(key, value); }},
      {"shard_q",
       [](Problem& p, View key, View value) { p.sharding_q = with_key(key, [&] { return Sharding::parse(value); }); }},
      {"shard_k",
       [](Problem& p, View key, View value) { p.sharding_k = with_key(key, [&] { return Sharding::parse(value); }); }},
      {"replicated_q", [](Problem& p, View key, View value) { p.replicated_q = parse_flag(key, value); }},
  };
  return table;
}

}  // namespace

std::int64_t parse_integer(std::string_view key, std::string_view value) { return parse_bounded<std::int64_t>(key, value); }

float parse_float(std::string_view key, std::string_view value) {
  float number = 0;
  const auto [end, error] = std::from_chars(value.data(), value.data() + value.size(), number);
  if (error == std::errc::invalid_argument || end != value.data() + value.size()) fail(key, value, "a number");
  if (error != std::errc()) fail(key, value, "a number that float32 can hold");
  return number;
}

bool parse_flag(std::string_view key, std::string_view value) {
  if (value != "0" && value != "1") fail(key, value, "0 or 1");
  return value == "1";
}

std::vector<Word> split_words(std::string_view line) {
  constexpr std::string_view kBlank = " \t\r\n";
  std::vector<Word> words;
  std::set<std::string> keys;
  for (std::size_t begin = line.find_first_not_of(kBlank); begin != std::string_view::npos;) {
    const std::size_t end = std::min(line.find_first_of(kBlank, begin), line.size());
    const std::string_view word = line.substr(begin, end - begin);
    const std::size_t equals = word.find('=');
    if (equals == std::string_view::npos || equals == 0) {
      throw InvalidArgument(fmt::format("'{}' is not a word of the form key=value", word));
    }
    words.emplace_back(word.substr(0, equals), word.substr(equals + 1));
    if (!keys.insert(words.back().first).second)
      throw InvalidArgument(fmt::format("the word {} occurs twice", words.back().first));
    begin = line.find_first_not_of(kBlank, end);
  }
  return words;
}

Problem parse_problem(std::string_view line, std::vector<Word>& others) {
  Problem problem;
  std::set<std::string> seen;
  for (Word& word : split_words(line)) {
    const auto setter = setters().find(word.first);
    if (setter == setters().end()) {
      others.push_back(std::move(word));
      continue;
    }
    setter->second(problem, word.first, word.second);
    seen.insert(word.first);
  }
  for (const char* key : {"nq", "h", "d"}) {
    if (!seen.contains(key)) {
      throw InvalidArgument(
          fmt::format("the word {}= is missing: a problem has at least nq= (tokens), h= (heads) and d= (head_dim)", key));
    }
  }
  if (!seen.contains("nk")) problem.tokens_k = problem.tokens_q;
  if (!seen.contains("hkv")) problem.kv_heads = problem.heads;
  if (!seen.contains("dv")) problem.head_dim_v = problem.head_dim;
  return problem;
}

Problem parse_problem(std::string_view line) {
  std::vector<Word> others;
  Problem problem = parse_problem(line, others);
  if (!others.empty()) throw InvalidArgument(fmt::format("unknown word {}={}", others[0].first, others[0].second));
  return problem;
}

std::string print_problem(const Problem& p) {
  const Problem plain;
  std::string line;
  const auto word = [&](std::string_view key, const auto& value) {
    line += fmt::format("{}{}={}", line.empty() ? "" : " ", key, value);
  };
  const auto list = [&](std::string_view key, const auto& values) {
    if (!values.empty()) word(key, fmt::format("{}", fmt::join(values, ",")));
  };
  if (p.batch != plain.batch) word("b", p.batch);
  word("nq", p.tokens_q);
  if (p.tokens_k != p.tokens_q) word("nk", p.tokens_k);
  word("h", p.heads);
  if (p.kv_heads != p.heads) word("hkv", p.kv_heads);
  word("d", p.head_dim);
  if (p.head_dim_v != p.head_dim) word("dv", p.head_dim_v);
  if (p.dtype != plain.dtype) word("dtype", to_string(p.dtype));
  if (p.pattern != plain.pattern) word("pattern", p.pattern.to_string());
  list("cu_q", p.cu_seqlens_q);
  list("cu_k", p.cu_seqlens_k);
  list("len_q", p.lengths_q);
  list("len_k", p.lengths_k);
  list("start_k", p.starts_k);
  if (p.scale != plain.scale) word("scale", p.scale);
  if (p.softcap != plain.softcap) word("softcap", p.softcap);
  if (p.alibi) word("alibi", 1);
  if (p.sinks) word("sinks", 1);
  if (p.dropout != plain.dropout) word("dropout", p.dropout);
  if (p.seed != plain.seed) word("seed", p.seed);
  if (p.ranks != plain.ranks) word("p", p.ranks);
  if (p.sharding_q != plain.sharding_q) word("shard_q", p.sharding_q.to_string());
  if (p.sharding_k != plain.sharding_k) word("shard_k", p.sharding_k.to_string());
  if (p.replicated_q) word("replicated_q", 1);
  return line;
}

}  // namespace ringspan::io
