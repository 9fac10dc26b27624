#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <tuple>
#include <utility>

#include "base/cut_text.h"
#include "pattern/validate.h"
#include "ringspan/error.h"
#include "ringspan/pattern.h"

namespace ringspan {
namespace {

using internal::kMaxOffset;

constexpr const char* kTerms =
    "full, causal, window:L,R, documents, prefix:P, block:Q0-Q1,K0-K1[,kind], dilated:WxR,... or "
    "dilated:geometric(W,RATIO,COUNT)";

// Recursive descent over the grammar in ringspan/pattern.h; every error knows its place.
class Parser {
 public:
  explicit Parser(std::string_view text) : text_(text) {}

  Pattern parse() {
    term();
    for (skip_spaces(); at_ < text_.size(); skip_spaces()) {
      if (peek('+')) fail(at_, fmt::format("'+' sums dilated terms only and cannot follow '{}'; '&' intersects", term_));
      if (!take('&')) fail(at_, "expected '&' or the end");
      term();
    }
    return std::move(pattern_);
  }

 private:
  void term() {
    skip_spaces();
    const std::size_t place = at_;
    term_ = word();
    if (term_ == "full") {
      attributes();
    } else if (term_ == "causal") {
      pattern_.causal = true;
      attributes();
    } else if (term_ == "documents") {
      pattern_.documents = true;
      attributes();
    } else if (term_ == "window") {
      window();
    } else if (term_ == "prefix") {
      prefix(place);
    } else if (term_ == "block") {
      blocks(place);
    } else if (term_ == "dilated") {
      dilated(place);
    } else {
      fail(place, term_.empty() ? fmt::format("expected a term: {}", kTerms)
                                : fmt::format("unknown term '{}': expected {}", term_, kTerms));
    }
  }

  // Of two windows the tighter one.
  void window() {
    expect(':', "window");
    Window window;
    window.left = bound();
    expect(',', "the left bound");
    window.right = bound();
    const auto tighter = [](std::int64_t a, std::int64_t b) { return a < 0 || b < 0 ? std::max(a, b) : std::min(a, b); };
    if (pattern_.window) {
      window.left = tighter(window.left, pattern_.window->left);
      window.right = tighter(window.right, pattern_.window->right);
    }
    pattern_.window = window;
    attributes();
  }

  void prefix(std::size_t place) {
    if (pattern_.prefix) fail(place, "a pattern holds one prefix; two have no common meaning here");
    expect(':', "prefix");
    pattern_.prefix = number("a number of keys", 0);
    attributes();
  }

  void blocks(std::size_t place) {
    if (pattern_.blocks) fail(place, "a pattern holds one list of blocks; join them with ';'");
    expect(':', "block");
    pattern_.blocks.emplace();
    skip_spaces();
    const bool none = at_ == text_.size() || text_[at_] == '&' || text_[at_] == '@';  // an empty list: nobody attends
    if (!none) {
      do {
        pattern_.blocks->push_back(block());
      } while (take(';'));
    }
    attributes();
    try {
      internal::validate(pattern_);
    } catch (const InvalidArgument& error) {
      fail(place, error.what());
    }
  }

  Block block() {
    Block block;
    std::tie(block.q_begin, block.q_end) = range("queries");
    expect(',', "the queries of a block");
    std::tie(block.k_begin, block.k_end) = range("keys");
    if (!take(',')) return block;
    skip_spaces();
    const std::size_t place = at_;
    const std::string kind = word();
    if (kind == "causal") {
      block.kind = BlockKind::causal;
    } else if (kind == "inverse_causal") {
      block.kind = BlockKind::inverse_causal;
    } else if (kind == "band") {
      block.kind = BlockKind::band;
      expect('(', "band");
      block.lo = number("the lowest j - i", -kMaxOffset);
      expect(',', "the lowest j - i");
      skip_spaces();
      const std::size_t high = at_;
      block.hi = number("the highest j - i", -kMaxOffset);
      if (block.hi < block.lo) fail(high, fmt::format("the highest j - i is below the lowest ({})", block.lo));
      expect(')', "the highest j - i");
    } else if (kind != "full") {
      fail(place, "expected the kind of the block: full, causal, inverse_causal or band(LO,HI)");
    }
    return block;
  }

  std::pair<std::int64_t, std::int64_t> range(const std::string& what) {
    const std::int64_t begin = number("the first of the " + what, 0);
    expect('-', "the first of the " + what);
    skip_spaces();
    const std::size_t place = at_;
    const std::int64_t end = number("the end of the " + what, 0);
    if (end < begin) fail(place, fmt::format("the end of the {} is before their beginning ({})", what, begin));
    return {begin, end};
  }

  void dilated(std::size_t place) {
    if (pattern_.dilated)
      fail(place, "a pattern holds one dilated term; '+' sums branches, an intersection of two is not supported");
    pattern_.dilated = dilated_term();
    while (take('+')) {
      skip_spaces();
      const std::size_t next = at_;
      if (const std::string name = word(); name != "dilated") {
        fail(next, fmt::format("'+' sums dilated terms only, not '{}'; '&' intersects", name));
      }
      const Dilated more = dilated_term();
      Dilated& sum = *pattern_.dilated;
      if (more.dialect != sum.dialect) fail(next, "'+' sums dilated terms of one dialect only");
      if (more.global != sum.global) fail(next, "'+' sums dilated terms that are all @global or none of them");
      sum.branches.insert(sum.branches.end(), more.branches.begin(), more.branches.end());
      if (sum.branches.size() > internal::kMaxBranches) {
        fail(next, fmt::format("expected at most {} branches", internal::kMaxBranches));
      }
    }
  }

  Dilated dilated_term() {
    expect(':', "dilated");
    Dilated dilated;
    do {
      skip_spaces();
      const std::size_t place = at_;
      if (const std::string name = word(); name == "geometric") {
        geometric(dilated.branches);
      } else if (!name.empty()) {
        fail(place, fmt::format("expected SEGMENTxRATE or geometric(W,RATIO,COUNT), not '{}'", name));
      } else {
        DilatedBranch branch;
        branch.segment = number("a segment", 1);
        expect('x', "the segment");
        branch.rate = number("a rate", 1);
        dilated.branches.push_back(branch);
      }
      if (dilated.branches.size() > internal::kMaxBranches) {
        fail(place, fmt::format("expected at most {} branches", internal::kMaxBranches));
      }
    } while (take(','));
    attributes(&dilated);
    return dilated;
  }

  // Branch i has segments of W ratio^i and the rate ratio^i (LongNet, section 3.2).
  void geometric(std::vector<DilatedBranch>& branches) {
    expect('(', "geometric");
    DilatedBranch branch{number("a segment", 1), 1};
    expect(',', "the segment");
    const std::int64_t ratio = number("a ratio", 1);
    expect(',', "the ratio");
    skip_spaces();
    const std::size_t place = at_;
    const std::int64_t count = number("a number of branches", 1);
    if (count > static_cast<std::int64_t>(internal::kMaxBranches)) {
      fail(place, fmt::format("expected at most {} branches", internal::kMaxBranches));
    }
    for (std::int64_t i = 0; i < count; ++i) {
      branches.push_back(branch);
      if (i + 1 == count) break;
      if (branch.segment > kMaxOffset / ratio)
        fail(place, fmt::format("segment {} would be larger than {}", i + 1, kMaxOffset));
      branch.segment *= ratio;
      branch.rate *= ratio;
    }
    expect(')', "the number of branches");
  }

  void attributes(Dilated* dilated = nullptr) {
    bool has_dialect = false;
    while (take('@')) {
      skip_spaces();
      const std::size_t place = at_;
      const std::string name = word();
      if (name == "top_left" || name == "bottom_right") {
        align(name == "top_left" ? Align::top_left : Align::bottom_right, place);
      } else if (name == "global" || name == "longnet" || name == "torchscale" || name == "head_groups") {
        if (dilated == nullptr) fail(place, fmt::format("'@{}' belongs after dilated, not after {}", name, term_));
        if (name == "global") {
          dilated->global = true;
          continue;
        }
        const Dialect dialect = name == "longnet"      ? Dialect::longnet
                                : name == "torchscale" ? Dialect::torchscale
                                                       : Dialect::head_groups;
        if (has_dialect && dialect != dilated->dialect) fail(place, "a dilated term has one dialect");
        dilated->dialect = dialect;
        has_dialect = true;
      } else {
        fail(place, dilated == nullptr ? "expected top_left or bottom_right"
                                       : "expected longnet, torchscale, head_groups, global, top_left or bottom_right");
      }
    }
  }

  // One alignment for the whole pattern.
  void align(Align align, std::size_t place) {
    if (has_align_ && align != pattern_.align) fail(place, "a pattern has one alignment; an earlier term has the other");
    pattern_.align = align;
    has_align_ = true;
  }

  std::int64_t bound() { return number("a number of keys, or -1 for no bound", -1); }

  std::int64_t number(const std::string& what, std::int64_t least) {
    skip_spaces();
    std::int64_t value = 0;
    const char* begin = text_.data() + at_;
    const auto [end, error] = std::from_chars(begin, text_.data() + text_.size(), value);
    if (error == std::errc::invalid_argument) fail(at_, "expected " + what);
    if (error != std::errc{} || value < least || value > kMaxOffset) {
      fail(at_, fmt::format("{}: expected {} in [{}, {}]", std::string_view(begin, static_cast<std::size_t>(end - begin)), what,
                            least, kMaxOffset));
    }
    at_ += static_cast<std::size_t>(end - begin);
    return value;
  }

  std::string word() {
    const auto is_letter = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || c == '_'; };
    const std::size_t begin = at_;
    while (at_ < text_.size() && is_letter(text_[at_])) ++at_;
    return std::string(text_.substr(begin, at_ - begin));
  }

  void skip_spaces() {
    while (at_ < text_.size() && (text_[at_] == ' ' || text_[at_] == '\t' || text_[at_] == '\n')) ++at_;
  }
  bool peek(char c) {
    skip_spaces();
    return at_ < text_.size() && text_[at_] == c;
  }
  bool take(char c) {
    if (!peek(c)) return false;
    ++at_;
    return true;
  }
  void expect(char c, const std::string& after) {
    if (!take(c)) fail(at_, fmt::format("expected '{}' after {}", c, after));
  }

  // The text with a caret below the place; of a long one only the part around it.
  [[noreturn]] void fail(std::size_t place, const std::string& what) const {
    constexpr std::size_t kShown = 100;
    const std::size_t before = place > kShown / 2 && text_.size() > kShown ? place - kShown / 2 : 0;
    const std::size_t begin = internal::cut_text(text_, before).size();
    std::string shown(internal::cut_text(text_.substr(begin), kShown));
    for (char& c : shown) {
      if (static_cast<unsigned char>(c) < ' ') c = ' ';
    }
    throw InvalidArgument(fmt::format("pattern: {}\n  {}\n  {:>{}}", what, shown, '^', place - begin + 1));
  }

  std::string_view text_;
  std::size_t at_ = 0;
  std::string term_;
  Pattern pattern_;
  bool has_align_ = false;
};

}  // namespace

Pattern Pattern::parse(std::string_view text) { return Parser(text).parse(); }

}  // namespace ringspan
