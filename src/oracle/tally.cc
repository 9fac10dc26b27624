#include <fmt/format.h>

#include <algorithm>
#include <string_view>

#include "base/check.h"
#include "oracle/random_problem.h"

namespace ringspan::oracle {
namespace {

struct Choice {
  std::string_view name;
  std::vector<std::string_view> values;
};

// Everything that draw_case() may draw, and how it is seen in a case.
const std::vector<Choice>& choices() {
  static const std::vector<Choice> list = {
      {"strategy", {"auto", "local", "all-gather", "exchange", "ring", "pass-q", "ulysses"}},
      {"pattern", {"full", "causal", "window", "documents", "prefix", "block", "longnet", "torchscale", "head_groups"}},
      {"of which", {"intersections", "@top_left", "@global", "documents of k", "lengths", "starts of k"}},
      {"block", {"full", "causal", "inverse_causal", "band"}},
      {"sharding of q", {"contiguous", "zigzag", "striped", "block_striped", "explicit", "replicated"}},
      {"sharding of k", {"contiguous", "zigzag", "striped", "block_striped", "explicit"}},
      {"dtype", {"float32", "bfloat16", "float16"}},
      {"heads", {"MHA", "GQA", "MQA"}},
      {"head_dim", {"odd", "even", "other than v's"}},
      {"ranks", {"1", "2", "3", "4", "5", "6", "7"}},
      {"batch", {"1", "2", "3"}},
      {"tokens", {"0", "1", "fewer than ranks", "prime", "over 1000", "n_q != n_k"}},
      {"options", {"scale", "softcap", "alibi", "sinks", "dropout", "dlse", "large logits", "o in 16 bits", "fake device"}},
      {"bucket", {"auto", "none", "rows"}},
      {"passes", {"forward", "forward and backward"}},
  };
  return list;
}

std::string_view sharding_name(ShardingKind kind) { return choices()[5].values[static_cast<std::size_t>(kind)]; }

// Calls see(choice, value) for everything that the case is an example of.
template <typename See>
void see_pattern(const Problem& p, See see) {
  const Pattern& pattern = p.pattern;
  int terms = 0;
  const auto term = [&](bool used, std::string_view name) {
    if (used) see("pattern", name);
    terms += used ? 1 : 0;
  };
  term(pattern.causal, "causal");
  term(pattern.window.has_value(), "window");
  term(pattern.documents, "documents");
  term(pattern.prefix.has_value(), "prefix");
  term(pattern.blocks.has_value(), "block");
  if (pattern.dilated) {
    constexpr std::string_view kDialects[] = {"longnet", "torchscale", "head_groups"};
    term(true, kDialects[static_cast<std::size_t>(pattern.dilated->dialect)]);
  }
  if (terms == 0) see("pattern", "full");
  if (terms > 1) see("of which", "intersections");
  if (pattern.align == Align::top_left) see("of which", "@top_left");
  if (pattern.dilated && pattern.dilated->global) see("of which", "@global");
  if (!p.cu_seqlens_k.empty()) see("of which", "documents of k");
  if (!p.lengths_q.empty() || !p.lengths_k.empty()) see("of which", "lengths");
  if (!p.starts_k.empty()) see("of which", "starts of k");
  if (!pattern.blocks) return;
  for (const Block& block : *pattern.blocks) see("block", choices()[3].values[static_cast<std::size_t>(block.kind)]);
}

template <typename See>
void see_shape(const Problem& p, See see) {
  see("sharding of q", p.replicated_q ? "replicated" : sharding_name(p.sharding_q.kind));
  see("sharding of k", sharding_name(p.sharding_k.kind));
  see("dtype", to_string(p.dtype));
  see("heads", p.group() == 1 ? "MHA" : p.kv_heads == 1 ? "MQA" : "GQA");
  see("head_dim", p.head_dim % 2 == 1 ? "odd" : "even");
  if (p.head_dim != p.head_dim_v) see("head_dim", "other than v's");
  see("ranks", std::to_string(p.ranks));
  see("batch", std::to_string(p.batch));
  if (p.tokens_q != p.tokens_k) see("tokens", "n_q != n_k");
  for (const std::int64_t tokens : {p.tokens_q, p.tokens_k}) {
    if (tokens <= 1) see("tokens", tokens == 0 ? "0" : "1");
    if (tokens < p.ranks) see("tokens", "fewer than ranks");
    if (is_prime(tokens)) see("tokens", "prime");
    if (tokens > 1000) see("tokens", "over 1000");
    if (p.tokens_q == p.tokens_k) break;
  }
}

template <typename See>
void see_options(const RandomCase& drawn, See see) {
  const Problem& p = drawn.problem;
  const PlanOptions& options = drawn.options;
  see("strategy", choices()[0].values[static_cast<std::size_t>(options.strategy)]);
  if (p.scale != 0.0F) see("options", "scale");
  if (p.softcap > 0.0F) see("options", "softcap");
  if (p.alibi) see("options", "alibi");
  if (p.sinks) see("options", "sinks");
  if (p.dropout > 0.0F) see("options", "dropout");
  if (drawn.dlse && options.backward) see("options", "dlse");
  if (drawn.gain > 10.0F) see("options", "large logits");
  if (!options.keep_o_float32 && options.backward && p.dtype != DType::float32) see("options", "o in 16 bits");
  if (drawn.fake_device) see("options", "fake device");
  see("bucket", options.bucket_rows > 0 ? "rows" : options.bucket_rows == 0 ? "auto" : "none");
  see("passes", options.backward ? "forward and backward" : "forward");
}

}  // namespace

Tally::Tally() {
  for (const Choice& choice : choices()) {
    for (const std::string_view value : choice.values) counts_.push_back({std::string(choice.name), std::string(value), 0});
  }
}

void Tally::add(const RandomCase& drawn) {
  const auto see = [&](std::string_view choice, std::string_view value) {
    const auto found =
        std::find_if(counts_.begin(), counts_.end(), [&](const Count& c) { return c.choice == choice && c.value == value; });
    RINGSPAN_CHECK(found != counts_.end());
    ++found->count;
  };
  see_pattern(drawn.problem, see);
  see_shape(drawn.problem, see);
  see_options(drawn, see);
}

std::vector<std::string> Tally::missing() const {
  std::vector<std::string> names;
  for (const Count& count : counts_) {
    if (count.count == 0) names.push_back(count.choice + ": " + count.value);
  }
  return names;
}

std::string Tally::to_string() const {
  std::string text;
  for (std::size_t x = 0; x < counts_.size(); ++x) {
    const bool first = x == 0 || counts_[x].choice != counts_[x - 1].choice;
    if (first) text += fmt::format("{}{}: ", x == 0 ? "" : "\n", counts_[x].choice);
    text += fmt::format("{}{} {}", first ? "" : ", ", counts_[x].value, counts_[x].count);
  }
  return text;
}

}  // namespace ringspan::oracle
