// The parameters of an attention pattern: who may attend to whom, as a user writes it.
//
// A pattern is the intersection of its terms, evaluated in frames. Without documents the whole problem (or one batch
// item) is the only frame; with documents each document is one. In a frame with queries [q0, q1) and keys [k0, k1)
//   diagonal = k1 - q1 (bottom_right, as flash-attn) or k0 - q0 (top_left)
//   causal          j - i <= diagonal
//   window(l, r)    diagonal - l <= j - i <= diagonal + r          (-1 = unlimited on that side)
//   prefix(p)       j - k0 < p, or causal
//   blocks          lists of rectangles, in frame-relative positions; no pair in two of them
//   dilated         query i stands at i' = i + diagonal; i attends j in branch (w, r) when, with positions taken
//                   relative to k0, floor(i'/w) = floor(j/w) and i' mod w = j mod w = s (mod r), s the residue of the head;
//                   the branches are summed (a key seen by two branches counts twice)
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace ringspan {

enum class Align : std::uint8_t { bottom_right, top_left };

enum class Dialect : std::uint8_t { longnet, torchscale, head_groups };

struct Window {
  std::int64_t left = -1;   // keys before the diagonal, inclusive; -1: unlimited
  std::int64_t right = -1;  // keys after the diagonal, inclusive; -1: unlimited
  bool operator==(const Window&) const = default;
};

struct DilatedBranch {
  std::int64_t segment = 0;  // w >= 1 tokens
  std::int64_t rate = 1;     // r >= 1
  bool operator==(const DilatedBranch&) const = default;
};

struct Dilated {
  std::vector<DilatedBranch> branches{};
  Dialect dialect = Dialect::longnet;
  bool global = false;  // segments ignore the documents' frames
  bool operator==(const Dilated&) const = default;
};

enum class BlockKind : std::uint8_t { full, causal, inverse_causal, band };

// Queries [q_begin, q_end) against keys [k_begin, k_end), relative to the frame.
//   causal: bottom-right aligned in the rectangle, j - i <= k_end - q_end
//   inverse_causal: top-left aligned, j - i >= k_begin - q_begin
//   band: lo <= j - i <= hi
struct Block {
  std::int64_t q_begin = 0, q_end = 0, k_begin = 0, k_end = 0;
  BlockKind kind = BlockKind::full;
  std::int64_t lo = 0, hi = 0;
  bool operator==(const Block&) const = default;
};

// Grammar, one string (docs/cli.md has the whole of it); spaces may stand between its parts:
//   pattern := term { '&' term }
//   term    := full | causal | window:L,R | documents | prefix:P | block:[Q0-Q1,K0-K1[,kind] {';' ...}] | dilated {'+' dilated}
//   kind    := full | causal | inverse_causal | band(LO,HI)
//   dilated := dilated:branch{,branch}, branch := WxR | geometric(W,RATIO,COUNT): COUNT branches (W RATIO^i) x RATIO^i
//   with '@top_left' or '@bottom_right' after any term (one alignment for the whole pattern), and '@longnet', '@torchscale',
//   '@head_groups', '@global' after dilated; '+' joins dilated terms that agree in these
struct Pattern {
  bool causal = false;
  std::optional<Window> window{};
  bool documents = false;  // the offsets are in the Problem: cu_seqlens
  std::optional<std::int64_t> prefix{};
  std::optional<std::vector<Block>> blocks{};
  std::optional<Dilated> dilated{};
  Align align = Align::bottom_right;

  // Throws InvalidArgument with the text, a caret under the offending character and what was expected.
  static Pattern parse(std::string_view text);
  // The canonical string; parse(to_string()) == *this.
  std::string to_string() const;

  // Number of softmax states: the branches of the torchscale dialect, otherwise 1.
  int states() const;
  // What the normalised output is multiplied with: 1 / branches in the head_groups dialect, otherwise 1.
  float output_scale() const;

  bool operator==(const Pattern&) const = default;
};

}  // namespace ringspan
