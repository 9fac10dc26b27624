#include "ringspan/draw.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "plan/plan_data.h"
#include "ringspan/error.h"

namespace ringspan {
namespace {

struct Cell {
  int rank = -1;
  int times = 0;
  bool operator==(const Cell&) const = default;
};

// One matrix of queries x keys, and the (batch, head) pairs that look like it.
struct Drawing {
  std::vector<Cell> cells;
  std::vector<std::pair<std::int64_t, std::int64_t>> of;
};

class Canvas {
 public:
  Canvas(const Problem& problem, const PlanOptions& options) : problem_(problem) {
    problem.validate();
    for (const auto& [name, tokens] : {std::pair{"tokens_q", problem.tokens_q}, std::pair{"tokens_k", problem.tokens_k}}) {
      if (tokens > kMaxDrawnTokens) {
        throw InvalidArgument(fmt::format("{} ({}) is too many to draw: at most {}; draw a shorter problem of the same kind",
                                          name, tokens, kMaxDrawnTokens));
      }
    }
    if (problem.ranks > kMaxDrawnRanks) {
      throw InvalidArgument(fmt::format("ranks ({}) are too many to draw: at most {}; draw a shorter problem of the same kind",
                                        problem.ranks, kMaxDrawnRanks));
    }
    for (int rank = 0; rank < problem.ranks; ++rank) plans_.push_back(make_plan(problem, options, rank));
    owners_q_ = owners(problem.tokens_q, true);
    owners_k_ = owners(problem.tokens_k, false);
    for (std::int64_t batch = 0; batch < problem.batch; ++batch) {
      for (std::int64_t head = 0; head < problem.heads; ++head) add(batch, head);
    }
    holding_.insert(owners_q_.begin(), owners_q_.end());
    holding_.insert(owners_k_.begin(), owners_k_.end());
    for (const Drawing& drawing : drawings_) {
      for (const Cell& cell : drawing.cells) {
        if (cell.times > 0) computing_.insert(cell.rank);
        most_times_ = std::max(most_times_, cell.times);
      }
    }
  }

  const Problem& problem() const { return problem_; }
  const std::vector<Drawing>& drawings() const { return drawings_; }
  const Cell& cell(const Drawing& drawing, std::int64_t i, std::int64_t j) const {
    return drawing.cells[static_cast<std::size_t>(i * problem_.tokens_k + j)];
  }
  const std::set<int>& holding() const { return holding_; }  // the ranks with tokens
  const std::set<int>& computing() const { return computing_; }
  int largest_rank() const {
    return std::max(holding_.empty() ? -1 : *holding_.rbegin(), computing_.empty() ? -1 : *computing_.rbegin());
  }
  int most_times() const { return most_times_; }  // that a key counts
  int owner_q(std::int64_t i) const { return owners_q_[static_cast<std::size_t>(i)]; }
  int owner_k(std::int64_t j) const { return owners_k_[static_cast<std::size_t>(j)]; }

  std::string title() const {
    return fmt::format("{}, {} queries x {} keys, {}, {} rank{}", problem_.pattern.to_string(), problem_.tokens_q,
                       problem_.tokens_k, to_string(plans_.front().strategy()), problem_.ranks, problem_.ranks == 1 ? "" : "s");
  }

  // "batch 0, heads 0 4 8"
  std::string name(const Drawing& drawing) const {
    std::map<std::int64_t, std::vector<std::int64_t>> heads_of;
    for (const auto& [batch, head] : drawing.of) heads_of[batch].push_back(head);
    std::map<std::vector<std::int64_t>, std::vector<std::int64_t>> batches_of;
    for (const auto& [batch, heads] : heads_of) batches_of[heads].push_back(batch);
    std::string text;
    for (const auto& [heads, batches] : batches_of) {
      if (!text.empty()) text += "; ";
      if (problem_.batch > 1) text += fmt::format("batch {}, ", fmt::join(batches, " "));
      text += heads.size() == static_cast<std::size_t>(problem_.heads) && heads.size() > 1
                  ? "all heads"
                  : fmt::format("head {}", fmt::join(heads, " "));
    }
    return text;
  }

 private:
  std::vector<int> owners(std::int64_t tokens, bool queries) const {
    std::vector<int> owners(static_cast<std::size_t>(tokens));
    for (const Plan& plan : plans_) {
      for (const Progression& piece : (queries ? plan.data().shard_q : plan.data().shard_k).pieces) {
        for (std::int64_t i = 0; i < piece.count; ++i) owners[static_cast<std::size_t>(piece.at(i))] = plan.rank();
      }
    }
    return owners;
  }

  void add(std::int64_t batch, std::int64_t head) {
    std::vector<Cell> cells(static_cast<std::size_t>(problem_.tokens_q * problem_.tokens_k));
    for (const Plan& plan : plans_) {
      for (const internal::AttendItem& item : plan.data().forward.attend_items) {
        const Slice& s = item.slice;
        if (!s.heads.contains(head) || batch < s.batch_first || batch >= s.batch_first + s.batch_count) continue;
        for (std::int64_t x = 0; x < s.q.count; ++x) {
          const std::int64_t i = s.q.at(x);
          for (std::int64_t y = 0; y < s.k.count; ++y) {
            const std::int64_t j = s.k.at(y);
            if (j - i < s.lo || j - i > s.hi) continue;
            Cell& cell = cells[static_cast<std::size_t>(i * problem_.tokens_k + j)];
            cell.rank = plan.rank();
            ++cell.times;
          }
        }
      }
    }
    for (Drawing& drawing : drawings_) {
      if (drawing.cells != cells) continue;
      drawing.of.emplace_back(batch, head);
      return;
    }
    drawings_.push_back({std::move(cells), {{batch, head}}});
  }

  const Problem& problem_;
  std::vector<Plan> plans_;
  std::vector<int> owners_q_, owners_k_;
  std::vector<Drawing> drawings_;
  std::set<int> holding_, computing_;
  int most_times_ = 0;
};

char letter(int rank) {
  if (rank < 26) return static_cast<char>('A' + rank);
  return rank < 52 ? static_cast<char>('a' + rank - 26) : '*';
}

char character(const Cell& cell, int ranks) {
  if (cell.times == 0) return '.';
  if (cell.times > 9) return '+';
  return cell.times > 1 || ranks == 1 ? static_cast<char>('0' + cell.times) : letter(cell.rank);
}

std::string escaped(const std::string& text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

// Neighbouring ranks get hues far apart; hues are 30 degrees apart at least, and come back paler.
constexpr int kHues = 12, kColours = 2 * kHues;
constexpr int kShades = 4;  // of a colour: attended once, twice, three times, more often

// In hexadecimal: not every program that shows SVG knows hsl().
std::string shade(int hue, double saturation, int times) {
  const double lightness = 0.60 - 0.14 * (std::min(times, kShades) - 1);
  const double amount = saturation * std::min(lightness, 1 - lightness);
  const auto channel = [&](int n) {
    const double at = std::fmod(n + hue / 30.0, 12.0);
    return std::lround(255 * (lightness - amount * std::clamp(std::min(at - 3, 9 - at), -1.0, 1.0)));
  };
  return fmt::format("#{:02x}{:02x}{:02x}", channel(0), channel(8), channel(4));
}

std::string colour(int rank, int times = 1) {
  return shade((210 + 150 * (rank % kHues)) % 360, rank % kColours < kHues ? 0.7 : 0.35, times);
}

// Pixels.
constexpr int kMargin = 16;           // around the page and between panels
constexpr int kAxis = 36, kTop = 24;  // left of and above the squares, for positions and owners
constexpr int kLine = 15;             // height of a line of text
constexpr int kCharacter = 7;         // width of a character, in wide fonts

// In lines of so many characters, each broken after a space or a mark where it has one.
std::vector<std::string> wrapped(std::string text, std::size_t length) {
  std::vector<std::string> lines;
  while (text.size() > length) {
    const std::size_t mark = text.find_last_of(" ,;&+", length - 1);
    const std::size_t end = mark == std::string::npos ? length : mark + 1;
    lines.push_back(text.substr(0, end));
    text.erase(0, end);
  }
  lines.push_back(std::move(text));
  return lines;
}

// Lines of text and of squares with what they mean, from top to bottom.
class Header {
 public:
  explicit Header(std::int64_t width) : width_(width) {}
  std::int64_t height() const { return y_ + kLine; }
  const std::string& svg() const { return svg_; }

  void text(const std::string& text) {
    for (const std::string& line : wrapped(text, static_cast<std::size_t>((width_ - 2 * kMargin) / kCharacter))) {
      y_ += kLine;
      put(kMargin, line);
    }
  }
  void begin_key(const std::string& name) {
    y_ += kLine;
    put(kMargin, name);
    x_ = kMargin + static_cast<std::int64_t>(name.size() + 1) * kCharacter;
  }
  void key(const std::string& fill, const std::string& name) {
    const std::int64_t wide = 13 + static_cast<std::int64_t>(name.size() + 1) * kCharacter;
    if (x_ + wide > width_) {
      y_ += kLine;
      x_ = kMargin;
    }
    fmt::format_to(std::back_inserter(svg_), "<rect x=\"{}\" y=\"{}\" width=\"10\" height=\"10\" fill=\"{}\"/>", x_, y_ - 9,
                   fill);
    put(x_ + 13, name);
    x_ += wide;
  }

 private:
  void put(std::int64_t x, const std::string& text) {
    fmt::format_to(std::back_inserter(svg_), "<text x=\"{}\" y=\"{}\">{}</text>\n", x, y_, escaped(text));
  }

  std::int64_t width_, x_ = 0, y_ = 4;
  std::string svg_;
};

// The cells of one look as one path: rectangles as wide as the run is long.
void append_cells(std::string& out, const Canvas& canvas, const Drawing& drawing, int size) {
  std::map<std::pair<int, int>, std::string> paths;
  const Problem& p = canvas.problem();
  for (std::int64_t i = 0; i < p.tokens_q; ++i) {
    for (std::int64_t j = 0; j < p.tokens_k;) {
      const Cell& cell = canvas.cell(drawing, i, j);
      std::int64_t end = j + 1;
      while (end < p.tokens_k && canvas.cell(drawing, i, end) == cell) ++end;
      if (cell.times > 0) {
        fmt::format_to(std::back_inserter(paths[{cell.rank, cell.times}]), "M{} {}h{}v{}h-{}z", j * size, i * size,
                       (end - j) * size, size, (end - j) * size);
      }
      j = end;
    }
  }
  for (const auto& [look, path] : paths) {
    fmt::format_to(std::back_inserter(out), "<path fill=\"{}\" d=\"{}\"><title>rank {}{}</title></path>\n",
                   colour(look.first, look.second), path, look.first,
                   look.second > 1 ? fmt::format(", {} times", look.second) : "");
  }
}

// The owners of the positions along an axis, as a coloured band.
template <typename Owner>
void append_owners(std::string& out, std::int64_t tokens, int size, bool vertical, Owner owner) {
  for (std::int64_t i = 0; i < tokens;) {
    std::int64_t end = i + 1;
    while (end < tokens && owner(end) == owner(i)) ++end;
    const std::int64_t at = i * size, length = (end - i) * size;
    fmt::format_to(std::back_inserter(out),
                   "<rect x=\"{}\" y=\"{}\" width=\"{}\" height=\"{}\" fill=\"{}\"><title>rank {}</title></rect>\n",
                   vertical ? -8 : at, vertical ? at : -8, vertical ? 6 : length, vertical ? length : 6, colour(owner(i)),
                   owner(i));
    i = end;
  }
}

// Positions along an axis, so far apart that they do not touch.
void append_positions(std::string& out, std::int64_t tokens, int size, bool vertical) {
  std::int64_t step = 1;
  for (const std::int64_t wider : {2, 5, 10, 20, 50}) {
    if (step * size < 32) step = wider;
  }
  for (std::int64_t i = 0; i < tokens; i += step) {
    const std::int64_t at = i * size + size / 2;
    fmt::format_to(std::back_inserter(out), "<text x=\"{}\" y=\"{}\" text-anchor=\"{}\">{}</text>\n", vertical ? -11 : at,
                   vertical ? at + 4 : -11, vertical ? "end" : "middle", i);
  }
}

}  // namespace

std::string draw_text(const Problem& problem, const PlanOptions& options) {
  const Canvas canvas(problem, options);
  std::string out = canvas.title() + "\n";
  auto to = std::back_inserter(out);
  for (const Drawing& drawing : canvas.drawings()) {
    fmt::format_to(to, "{}\n", canvas.name(drawing));
    out += "         ";
    for (std::int64_t j = 0; j < problem.tokens_k; ++j) out += letter(canvas.owner_k(j));
    out += '\n';
    for (std::int64_t i = 0; i < problem.tokens_q; ++i) {
      fmt::format_to(to, "{:6} {} ", i, letter(canvas.owner_q(i)));
      for (std::int64_t j = 0; j < problem.tokens_k; ++j) out += character(canvas.cell(drawing, i, j), problem.ranks);
      out += '\n';
    }
  }
  if (canvas.most_times() > 9) out += "'+' attends more than 9 times\n";
  if (canvas.largest_rank() >= 52) out += "'*' is any rank from 52 on\n";
  return out;
}

std::string draw_svg(const Problem& problem, const PlanOptions& options) {
  const Canvas canvas(problem, options);
  const std::int64_t tokens = std::max({problem.tokens_q, problem.tokens_k, std::int64_t{1}});
  const int size = static_cast<int>(std::clamp<std::int64_t>(384 / tokens, 1, 16));
  const auto panels = static_cast<std::int64_t>(canvas.drawings().size());
  const std::int64_t columns = std::clamp<std::int64_t>(panels, 1, 4);
  const std::int64_t wide = std::max<std::int64_t>(kAxis + problem.tokens_k * size, 128) + kMargin;
  const std::int64_t width = std::max<std::int64_t>(columns * wide + kMargin, 520);
  // A panel alone may have a name as wide as the page.
  const std::int64_t name_width = columns == 1 ? width - kMargin : wide;
  std::vector<std::vector<std::string>> names;
  std::size_t name_lines = 0;
  for (const Drawing& drawing : canvas.drawings()) {
    names.push_back(wrapped(canvas.name(drawing), static_cast<std::size_t>((name_width - kMargin) / kCharacter)));
    name_lines = std::max(name_lines, names.back().size());
  }
  const std::int64_t name_height = static_cast<std::int64_t>(name_lines) * kLine;
  const std::int64_t high = name_height + kTop + problem.tokens_q * size + kMargin;

  Header header(width);
  header.text(canvas.title());
  header.text("rows: queries, columns: keys; bands: who holds, squares: who computes");
  std::vector<int> holding_only;
  std::ranges::set_difference(canvas.holding(), canvas.computing(), std::back_inserter(holding_only));
  if (!canvas.computing().empty()) header.begin_key("ranks that compute");
  for (const int rank : canvas.computing()) header.key(colour(rank), std::to_string(rank));
  if (!holding_only.empty()) header.begin_key("ranks that only hold");
  for (const int rank : holding_only) header.key(colour(rank), std::to_string(rank));
  if (canvas.largest_rank() >= kColours) {
    header.text(fmt::format("ranks {} apart share a colour; point at a square to see its rank", kColours));
  }
  if (canvas.most_times() > 1) {
    header.begin_key("a key counts");
    for (int times = 1; times <= std::min(canvas.most_times(), kShades); ++times) {
      const bool open = times == kShades && canvas.most_times() > kShades;
      header.key(shade(0, 0, times), fmt::format("{}{} time{}", times, open ? " or more" : "", times == 1 ? "" : "s"));
    }
  }
  const std::int64_t height = header.height() + (panels + columns - 1) / columns * high;
  std::string out;
  auto to = std::back_inserter(out);
  fmt::format_to(to,
                 "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" viewBox=\"0 0 {0} {1}\" "
                 "font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"{0}\" height=\"{1}\" fill=\"white\"/>\n",
                 width, height);
  out += header.svg();
  for (std::int64_t panel = 0; panel < panels; ++panel) {
    const std::int64_t top = name_height + kTop;
    fmt::format_to(to, "<g transform=\"translate({} {})\">\n", panel % columns * wide + kMargin + kAxis,
                   header.height() + panel / columns * high + top);
    std::int64_t y = 11 - top;
    for (const std::string& line : names[static_cast<std::size_t>(panel)]) {
      fmt::format_to(to, "<text x=\"{}\" y=\"{}\">{}</text>\n", -kAxis, y, escaped(line));
      y += kLine;
    }
    fmt::format_to(to, "<rect width=\"{}\" height=\"{}\" fill=\"#f2f2f2\"/>\n", problem.tokens_k * size,
                   problem.tokens_q * size);
    append_positions(out, problem.tokens_q, size, true);
    append_positions(out, problem.tokens_k, size, false);
    append_owners(out, problem.tokens_q, size, true, [&](std::int64_t i) { return canvas.owner_q(i); });
    append_owners(out, problem.tokens_k, size, false, [&](std::int64_t j) { return canvas.owner_k(j); });
    append_cells(out, canvas, canvas.drawings()[static_cast<std::size_t>(panel)], size);
    out += "</g>\n";
  }
  return out + "</svg>\n";
}

}  // namespace ringspan
