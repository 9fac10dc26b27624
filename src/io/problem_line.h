// A Problem as one line of words `key=value`, so that a failure can be repeated by pasting it.
//
//   b=2 nq=1000 nk=800 h=8 hkv=2 d=64 dv=32 dtype=bfloat16 pattern=causal&documents cu_q=0,17,1000 cu_k=0,400,800 p=4
//
//   b        batch (1)                          cu_q cu_k   document offsets of q and k (k: those of q)
//   nq nk    tokens of q and k (nk: nq)         len_q len_k a length per batch item (all tokens)
//   h hkv    heads, kv heads (hkv: h)           scale       of the scores (1 / sqrt(d))
//   d dv     head dims of q/k and v (dv: d)     softcap     (off)
//   dtype    (float32)                          alibi sinks 1 where used (0)
//   pattern  (full)                             dropout seed probability and seed (0)
//   p        ranks (1)                          shard_q shard_k (contiguous)   replicated_q (0)
//   start_k  the first key of each batch item (0)
//
// nq, h and d are required. Words may come in any order; what has its default is not printed. parse(print(x)) == x. Pure.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "ringspan/problem.h"

namespace ringspan::io {

// A word that is not of the problem: execution options of a tool.
using Word = std::pair<std::string, std::string>;

std::string print_problem(const Problem& problem);

// Throws InvalidArgument naming the word. Does not validate the problem as a whole.
Problem parse_problem(std::string_view line);
// The same, but words of other keys are appended to `others`.
Problem parse_problem(std::string_view line, std::vector<Word>& others);

// Splits a line into words; throws InvalidArgument for a word without '=' or a key that occurs twice.
std::vector<Word> split_words(std::string_view line);

// Values of words; `key` is for the message.
std::int64_t parse_integer(std::string_view key, std::string_view value);
float parse_float(std::string_view key, std::string_view value);
bool parse_flag(std::string_view key, std::string_view value);  // 0 or 1

}  // namespace ringspan::io
