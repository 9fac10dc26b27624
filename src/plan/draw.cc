#include "ringspan/draw.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <map>
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
    for (int rank = 0; rank < problem.ranks; ++rank) plans_.push_back(make_plan(problem, options, rank));
    owners_q_ = owners(problem.tokens_q, true);
    owners_k_ = owners(problem.tokens_k, false);
    for (std::int64_t batch = 0; batch < problem.batch; ++batch) {
      for (std::int64_t head = 0; head < problem.heads; ++head) add(batch, head);
    }
  }

  const Problem& problem() const { return problem_; }
  const std::vector<Drawing>& drawings() const { return drawings_; }
  const Cell& cell(const Drawing& drawing, std::int64_t i, std::int64_t j) const {
    return drawing.cells[static_cast<std::size_t>(i * problem_.tokens_k + j)];
  }
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

// Neighbouring ranks get hues far apart.
std::string colour(int rank, int times = 1) {
  const double hue = std::fmod(210.0 + 137.508 * rank, 360.0);
  return fmt::format("hsl({:.0f},{}%,{}%)", hue, 60, std::max(60 - 14 * (times - 1), 18));
}

constexpr int kMargin = 24;  // pixels around a panel, for its name and the owners

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
  return out;
}

std::string draw_svg(const Problem& problem, const PlanOptions& options) {
  const Canvas canvas(problem, options);
  const std::int64_t tokens = std::max({problem.tokens_q, problem.tokens_k, std::int64_t{1}});
  const int size = static_cast<int>(std::clamp<std::int64_t>(384 / tokens, 1, 16));
  const auto panels = static_cast<std::int64_t>(canvas.drawings().size());
  const std::int64_t columns = std::min<std::int64_t>(panels, 4);
  const std::int64_t wide = problem.tokens_k * size + 2 * kMargin, high = problem.tokens_q * size + 2 * kMargin;
  const std::int64_t width = std::max<std::int64_t>(columns * wide, 480);
  const std::int64_t height = (panels + columns - 1) / std::max<std::int64_t>(columns, 1) * high + 2 * kMargin;
  std::string out;
  auto to = std::back_inserter(out);
  fmt::format_to(to,
                 "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{0}\" height=\"{1}\" viewBox=\"0 0 {0} {1}\" "
                 "font-family=\"sans-serif\" font-size=\"11\">\n<rect width=\"{0}\" height=\"{1}\" fill=\"white\"/>\n",
                 width, height);
  fmt::format_to(to, "<text x=\"{}\" y=\"16\">{}</text>\n", kMargin, escaped(canvas.title()));
  for (int rank = 0; rank < std::min(problem.ranks, 16); ++rank) {
    fmt::format_to(to, "<rect x=\"{}\" y=\"22\" width=\"10\" height=\"10\" fill=\"{}\"/><text x=\"{}\" y=\"31\">{}</text>\n",
                   kMargin + rank * 28, colour(rank), kMargin + rank * 28 + 12, rank);
  }
  for (std::int64_t panel = 0; panel < panels; ++panel) {
    const Drawing& drawing = canvas.drawings()[static_cast<std::size_t>(panel)];
    fmt::format_to(to, "<g transform=\"translate({} {})\">\n<text x=\"0\" y=\"-11\">{}</text>\n",
                   panel % columns * wide + kMargin, panel / columns * high + 3 * kMargin, escaped(canvas.name(drawing)));
    fmt::format_to(to, "<rect width=\"{}\" height=\"{}\" fill=\"#f2f2f2\"/>\n", problem.tokens_k * size,
                   problem.tokens_q * size);
    append_owners(out, problem.tokens_q, size, true, [&](std::int64_t i) { return canvas.owner_q(i); });
    append_owners(out, problem.tokens_k, size, false, [&](std::int64_t j) { return canvas.owner_k(j); });
    append_cells(out, canvas, drawing, size);
    out += "</g>\n";
  }
  return out + "</svg>\n";
}

}  // namespace ringspan
