#include "ringspan/sharding.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <limits>
#include <tuple>
#include <utility>

#include "base/arithmetic.h"
#include "base/int128.h"
#include "pattern/slice.h"
#include "pattern/validate.h"
#include "ringspan/error.h"

namespace ringspan {
namespace {

// Interleaved pieces are merged through a list of their positions; beyond this many it would not fit in memory.
constexpr std::int64_t kMaxEnumerated = std::int64_t{1} << 28;
// Of block_striped: a piece each.
constexpr std::int64_t kMaxBlocks = std::int64_t{1} << 24;

std::string_view kind_name(ShardingKind kind) {
  switch (kind) {
    case ShardingKind::contiguous:
      return "contiguous";
    case ShardingKind::zigzag:
      return "zigzag";
    case ShardingKind::striped:
      return "striped";
    case ShardingKind::block_striped:
      return "block_striped";
    case ShardingKind::explicit_lists:
      return "explicit";
  }
  throw InvalidArgument(fmt::format("sharding.kind ({}) is none of the known kinds", static_cast<int>(kind)));
}

std::string to_text(const Progression& p) {
  if (p.count == 1 || p.stride == 1) return fmt::format("{}-{}", p.first, p.last());
  return fmt::format("{}-{}:{}", p.first, p.last(), p.stride);
}

// Chunk c of `chunks` contiguous ones, the first tokens mod chunks of which are one position larger.
Progression chunk(std::int64_t tokens, std::int64_t chunks, std::int64_t c) {
  const std::int64_t size = tokens / chunks, larger = tokens % chunks;
  return {c * size + std::min(c, larger), 1, size + (c < larger ? 1 : 0)};
}

// Appends a piece that lies behind all others, joined to the last one where the two are one run.
void append(std::vector<Progression>& pieces, Progression p) {
  if (p.empty()) return;
  if (p.count == 1) p.stride = 1;
  if (!pieces.empty()) {
    Progression& last = pieces.back();
    if (last.stride == 1 && p.stride == 1 && p.first == last.end()) {
      last.count += p.count;
      return;
    }
  }
  pieces.push_back(p);
}

// Runs of equal steps in ascending positions.
void append_runs(std::vector<Progression>& pieces, const std::vector<std::int64_t>& positions) {
  for (std::size_t i = 0; i < positions.size();) {
    std::size_t end = i + 1;
    const std::int64_t stride = end < positions.size() ? positions[end] - positions[i] : 1;
    while (end < positions.size() && positions[end] - positions[end - 1] == stride) ++end;
    append(pieces, {positions[i], stride, static_cast<std::int64_t>(end - i)});
    i = end;
  }
}

// Any disjoint progressions as pieces with disjoint ascending hulls: those that interleave are enumerated.
std::vector<Progression> with_disjoint_hulls(std::vector<Progression> list) {
  std::erase_if(list, [](const Progression& p) { return p.empty(); });
  std::sort(list.begin(), list.end(), [](const auto& a, const auto& b) { return a.first < b.first; });
  std::vector<Progression> pieces;
  for (std::size_t i = 0; i < list.size();) {
    std::int64_t end = list[i].end();
    std::int64_t rows = list[i].count;
    std::size_t next = i + 1;
    for (; next < list.size() && list[next].first < end; ++next) {
      end = std::max(end, list[next].end());
      rows += list[next].count;
    }
    if (next == i + 1) {
      append(pieces, list[i]);
    } else if (rows == end - list[i].first) {
      append(pieces, {list[i].first, 1, rows});
    } else {
      if (rows > kMaxEnumerated) {
        throw Unsupported(
            fmt::format("sharding: interleaved progressions of one rank hold {} positions; at most {} can be merged", rows,
                        kMaxEnumerated));
      }
      std::vector<std::int64_t> positions;
      positions.reserve(static_cast<std::size_t>(rows));
      for (std::size_t piece = i; piece < next; ++piece) {
        for (std::int64_t x = 0; x < list[piece].count; ++x) positions.push_back(list[piece].at(x));
      }
      std::sort(positions.begin(), positions.end());
      append_runs(pieces, positions);
    }
    i = next;
  }
  return pieces;
}

// Disjoint and inside [0, tokens) and as many positions as tokens: then nothing is missing either.
void validate_lists(const Sharding& sharding, std::int64_t tokens) {
  struct Entry {
    Progression piece;
    std::size_t rank;
  };
  std::vector<Entry> entries;
  Int128 rows = 0;
  for (std::size_t rank = 0; rank < sharding.lists.size(); ++rank) {
    for (const Progression& p : sharding.lists[rank]) {
      if (p.stride < 1) {
        throw InvalidArgument(fmt::format("sharding.lists[{}] has stride {}, expected at least 1", rank, p.stride));
      }
      if (p.count < 0)
        throw InvalidArgument(fmt::format("sharding.lists[{}] has count {}, expected at least 0", rank, p.count));
      if (p.empty()) continue;
      if (p.first < 0 || Int128{p.first} + Int128{p.count - 1} * p.stride >= tokens) {
        throw InvalidArgument(fmt::format("sharding.lists[{}] holds positions outside [0, {}): first {}, stride {}, count {}",
                                          rank, tokens, p.first, p.stride, p.count));
      }
      entries.push_back({p, rank});
      rows += p.count;
    }
  }
  std::sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) { return a.piece.first < b.piece.first; });
  std::vector<Entry> active;  // those whose hull reaches the entry at hand
  for (const Entry& entry : entries) {
    std::erase_if(active, [&](const Entry& other) { return other.piece.end() <= entry.piece.first; });
    for (const Entry& other : active) {
      const Progression common = intersect(entry.piece, other.piece);
      if (common.empty()) continue;
      const auto& [low, high] = entry.rank < other.rank ? std::tie(entry, other) : std::tie(other, entry);
      throw InvalidArgument(
          fmt::format("sharding: position {} is in the lists of rank {} ({}) and rank {} ({}); lists must be disjoint",
                      common.first, low.rank, to_text(low.piece), high.rank, to_text(high.piece)));
    }
    active.push_back(entry);
  }
  if (rows != tokens) {
    throw InvalidArgument(
        fmt::format("sharding: the lists hold {} positions of {}; they must cover all of them", to_string(rows), tokens));
  }
}

Shard with_offsets(std::vector<Progression> pieces) {
  Shard shard;
  shard.pieces = std::move(pieces);
  shard.offsets.reserve(shard.pieces.size());
  for (const Progression& piece : shard.pieces) {
    shard.offsets.push_back(shard.rows);
    shard.rows += piece.count;
  }
  return shard;
}

std::vector<Progression> block_pieces(std::int64_t tokens, std::int64_t ranks, std::int64_t rank, std::int64_t block) {
  std::vector<Progression> pieces;
  if (block == 1) {
    if (rank < tokens) append(pieces, {rank, ranks, (tokens - 1 - rank) / ranks + 1});
    return pieces;
  }
  const std::int64_t blocks = internal::ceil_div(tokens, block);
  if (ranks == 1) append(pieces, {0, 1, tokens});
  if (ranks == 1 || rank >= blocks) return pieces;
  pieces.reserve(static_cast<std::size_t>((blocks - 1 - rank) / ranks + 1));
  for (std::int64_t b = rank; b < blocks; b += ranks) append(pieces, {b * block, 1, std::min(block, tokens - b * block)});
  return pieces;
}

// What to_string() writes after "explicit:"; the text is the user's, so every step may fail.
class ListParser {
 public:
  explicit ListParser(std::string_view text, std::size_t at) : text_(text), at_(at) {}

  std::vector<std::vector<Progression>> parse() {
    std::vector<std::vector<Progression>> lists(1);
    while (at_ < text_.size()) {
      if (take(';')) {
        lists.emplace_back();
        continue;
      }
      do {
        lists.back().push_back(progression());
      } while (take(','));
      if (at_ < text_.size() && text_[at_] != ';') fail("expected ',', ';' or the end");
    }
    return lists;
  }

 private:
  Progression progression() {
    Progression p;
    p.first = number();
    const std::size_t place = at_;
    const std::int64_t last = take('-') ? number() : p.first;
    if (last < p.first) fail_at(place, "the last position is before the first");
    if (take(':')) {
      p.stride = number();
      if (p.stride < 1) fail_at(at_ - 1, "expected a stride of at least 1");
    }
    p.count = (last - p.first) / p.stride + 1;
    if (p.count == 1) p.stride = 1;
    return p;
  }

  bool take(char c) {
    if (at_ >= text_.size() || text_[at_] != c) return false;
    ++at_;
    return true;
  }

  std::int64_t number() {
    std::int64_t value = 0;
    const char* begin = text_.data() + at_;
    const auto [end, error] = std::from_chars(begin, text_.data() + text_.size(), value);
    if (error == std::errc::invalid_argument || *begin == '-') fail("expected a position");
    if (error != std::errc{})
      fail(fmt::format("{} is beyond the most tokens ({})", std::string_view(begin, end), internal::kMaxTokens));
    if (value >= internal::kMaxTokens) fail(fmt::format("{} is beyond the most tokens ({})", value, internal::kMaxTokens));
    at_ += static_cast<std::size_t>(end - begin);
    return value;
  }

  [[noreturn]] void fail(const std::string& what) const { fail_at(at_, what); }
  [[noreturn]] void fail_at(std::size_t place, const std::string& what) const {
    throw InvalidArgument(fmt::format("sharding: {}\n  {}\n  {:>{}}", what, text_, '^', place + 1));
  }

  std::string_view text_;
  std::size_t at_;
};

template <typename Copy>
void for_each_run(const Shard& shard, std::int64_t tokens, std::int64_t outer, std::int64_t row_bytes, Copy&& copy) {
  if (shard.offsets.size() != shard.pieces.size()) {
    throw InvalidArgument(
        fmt::format("shard: {} offsets for {} pieces, but as many were expected", shard.offsets.size(), shard.pieces.size()));
  }
  std::int64_t end = 0;
  for (std::size_t i = 0; i < shard.pieces.size(); ++i) {
    const Progression& piece = shard.pieces[i];
    const std::int64_t row = shard.offsets[i];
    const auto is_sound = [](std::int64_t x) { return x >= 0 && x <= internal::kMaxTokens; };
    if (!is_sound(piece.first) || !is_sound(piece.count) || !is_sound(piece.stride - 1) || !is_sound(row) ||
        Int128{piece.first} + Int128{piece.count} * piece.stride > std::numeric_limits<std::int64_t>::max()) {
      throw InvalidArgument(fmt::format("shard: piece {} has first {}, count {}, stride {}, offset {}, which no shard has", i,
                                        piece.first, piece.count, piece.stride, row));
    }
    if (row + piece.count > shard.rows) {
      throw InvalidArgument(
          fmt::format("shard: piece {} ends at row {}, but the shard has {}", i, row + piece.count, shard.rows));
    }
    end = std::max(end, piece.end());
  }
  if (tokens < end) throw InvalidArgument(fmt::format("tokens ({}) must be at least {}, the end of the shard", tokens, end));
  if (outer < 0) throw InvalidArgument(fmt::format("outer ({}) must be at least 0", outer));
  if (row_bytes < 0) throw InvalidArgument(fmt::format("row_bytes ({}) must be at least 0", row_bytes));
  for (std::int64_t o = 0; o < outer; ++o) {
    for (std::size_t i = 0; i < shard.pieces.size(); ++i) {
      const Progression& piece = shard.pieces[i];
      const std::int64_t local = o * shard.rows + shard.offsets[i];
      if (piece.stride == 1) {
        copy((o * tokens + piece.first) * row_bytes, local * row_bytes, piece.count * row_bytes);
        continue;
      }
      for (std::int64_t x = 0; x < piece.count; ++x) {
        copy((o * tokens + piece.at(x)) * row_bytes, (local + x) * row_bytes, row_bytes);
      }
    }
  }
}

}  // namespace

Sharding Sharding::parse(std::string_view text) {
  for (const ShardingKind kind : {ShardingKind::contiguous, ShardingKind::zigzag, ShardingKind::striped}) {
    if (text == kind_name(kind)) return {kind, 0, {}};
  }
  constexpr std::string_view kBlock = "block_striped:", kExplicit = "explicit:";
  if (text.starts_with(kBlock)) {
    const std::string_view size = text.substr(kBlock.size());
    Sharding sharding{ShardingKind::block_striped, 0, {}};
    const auto [end, error] = std::from_chars(size.data(), size.data() + size.size(), sharding.block);
    if (error == std::errc::result_out_of_range && end == size.data() + size.size() && size.front() != '-') {
      throw InvalidArgument(fmt::format("sharding '{}': a block of more than {} positions", text, internal::kMaxTokens));
    }
    if (error != std::errc{} || end != size.data() + size.size() || sharding.block < 1) {
      throw InvalidArgument(fmt::format("sharding '{}': expected a block size of at least 1", text));
    }
    return sharding;
  }
  if (text.starts_with(kExplicit)) return {ShardingKind::explicit_lists, 0, ListParser(text, kExplicit.size()).parse()};
  throw InvalidArgument(fmt::format(
      "unknown sharding '{}': expected contiguous, zigzag, striped, block_striped:SIZE or explicit:FIRST-LAST[:STRIDE],...;...",
      text));
}

std::string Sharding::to_string() const {
  if (kind == ShardingKind::block_striped) return fmt::format("block_striped:{}", block);
  std::string text(kind_name(kind));
  if (kind != ShardingKind::explicit_lists) return text;
  text += ":";
  for (std::size_t rank = 0; rank < lists.size(); ++rank) {
    if (rank > 0) text += ";";
    bool first = true;
    for (const Progression& p : lists[rank]) {
      if (p.empty()) continue;
      if (!std::exchange(first, false)) text += ",";
      text += to_text(p);
    }
  }
  return text;
}

std::vector<std::int64_t> Shard::positions() const {
  std::vector<std::int64_t> result;
  result.reserve(static_cast<std::size_t>(rows));
  for (const Progression& piece : pieces) {
    for (std::int64_t x = 0; x < piece.count; ++x) result.push_back(piece.at(x));
  }
  return result;
}

Shard make_shard(const Sharding& sharding, std::int64_t tokens, int ranks, int rank) {
  validate(sharding, tokens, ranks);
  if (rank < 0 || rank >= ranks) {
    throw InvalidArgument(fmt::format("rank ({}) must be in [0, {})", rank, ranks));
  }
  return internal::make_valid_shard(sharding, tokens, ranks, rank);
}

Shard internal::make_valid_shard(const Sharding& sharding, std::int64_t tokens, int ranks, int rank) {
  const std::int64_t p = ranks;
  std::vector<Progression> pieces;
  switch (sharding.kind) {
    case ShardingKind::contiguous:
      append(pieces, chunk(tokens, p, rank));
      break;
    case ShardingKind::zigzag:
      append(pieces, chunk(tokens, 2 * p, rank));
      append(pieces, chunk(tokens, 2 * p, 2 * p - 1 - rank));
      break;
    case ShardingKind::striped:
      pieces = block_pieces(tokens, p, rank, 1);
      break;
    case ShardingKind::block_striped:
      pieces = block_pieces(tokens, p, rank, sharding.block);
      break;
    case ShardingKind::explicit_lists:
      pieces = with_disjoint_hulls(sharding.lists[static_cast<std::size_t>(rank)]);
      break;
  }
  return with_offsets(std::move(pieces));
}

void validate(const Sharding& sharding, std::int64_t tokens, int ranks) {
  const std::string_view name = kind_name(sharding.kind);
  if (ranks < 1) throw InvalidArgument(fmt::format("ranks ({}) must be at least 1", ranks));
  if (tokens < 0) throw InvalidArgument(fmt::format("tokens ({}) must be at least 0", tokens));
  if (sharding.kind == ShardingKind::block_striped) {
    if (sharding.block < 1) {
      throw InvalidArgument(fmt::format("sharding.block ({}) must be at least 1 for block_striped", sharding.block));
    }
    // Every rank knows the pieces of all.
    if (ranks > 1 && sharding.block > 1 && internal::ceil_div(tokens, sharding.block) > kMaxBlocks) {
      throw Unsupported(
          fmt::format("sharding.block ({}) deals {} tokens in {} blocks, more than {}; use blocks of at least {}, or striped",
                      sharding.block, tokens, internal::ceil_div(tokens, sharding.block), kMaxBlocks,
                      internal::ceil_div(tokens, kMaxBlocks)));
    }
  } else if (sharding.block != 0) {
    throw InvalidArgument(fmt::format("sharding.block ({}) must be 0 for {}", sharding.block, name));
  }
  if (sharding.kind != ShardingKind::explicit_lists) {
    if (!sharding.lists.empty()) throw InvalidArgument(fmt::format("sharding.lists must be empty for {}", name));
    return;
  }
  if (sharding.lists.size() != static_cast<std::size_t>(ranks)) {
    throw InvalidArgument(
        fmt::format("sharding.lists has {} lists, expected one for each of the {} ranks", sharding.lists.size(), ranks));
  }
  validate_lists(sharding, tokens);
}

void shard_rows(const Shard& shard, std::int64_t tokens, std::int64_t outer, std::int64_t row_bytes, const void* full,
                void* local) {
  const auto* from = static_cast<const char*>(full);
  auto* to = static_cast<char*>(local);
  for_each_run(shard, tokens, outer, row_bytes, [&](std::int64_t at_full, std::int64_t at_local, std::int64_t bytes) {
    std::memcpy(to + at_local, from + at_full, static_cast<std::size_t>(bytes));
  });
}

void unshard_rows(const Shard& shard, std::int64_t tokens, std::int64_t outer, std::int64_t row_bytes, const void* local,
                  void* full) {
  const auto* from = static_cast<const char*>(local);
  auto* to = static_cast<char*>(full);
  for_each_run(shard, tokens, outer, row_bytes, [&](std::int64_t at_full, std::int64_t at_local, std::int64_t bytes) {
    std::memcpy(to + at_full, from + at_local, static_cast<std::size_t>(bytes));
  });
}

}  // namespace ringspan
