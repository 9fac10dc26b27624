#include "plan/compact_sums.h"

#include <algorithm>
#include <map>
#include <optional>
#include <vector>

#include "base/arithmetic.h"
#include "plan/common_parts.h"
#include "plan/cover.h"
#include "plan/rewrite_rows.h"

namespace ringspan::internal {
namespace {

constexpr std::int64_t kMostFillComparisons = std::int64_t{1} << 22;

class Compactor {
 public:
  Compactor(ProgramBuilder& builder, int group)
      : builder_(builder), program_(builder.program()), group_(group), is_taken_(builder.regions_with_messages()) {}

  void run() {
    find_fills();
    find_references();
    for (const auto& [region, views] : views_) compact(region, views);
  }

 private:
  // What touches rows of a view, and the fill that has them.
  struct Reference {
    RowRef* ref = nullptr;
    Strip strip;
    std::size_t fill = 0;
  };
  struct Sums {
    std::vector<RowItem> fills;
    std::vector<Reference> references;
    bool is_known = true;  // all that touches them
  };

  bool are_sums(const RowRef& ref) const {
    if (ref.view < 0) return false;
    const View& view = program_.views[static_cast<std::size_t>(ref.view)];
    const bool is_gradient = view.kind == TensorKind::dq || view.kind == TensorKind::dk || view.kind == TensorKind::dv;
    return is_gradient && view.in_arena && view.dtype == DType::float32;
  }

  void find_fills() {
    for_launches(program_, [&](const Launch& launch) {
      if (launch.kind != LaunchKind::fill) return;
      for (std::int64_t index = launch.first; index < launch.first + launch.count; ++index) {
        const RowItem& item = program_.row_items[static_cast<std::size_t>(index)];
        if (are_sums(item.operands[0])) sums_[item.operands[0].view].fills.push_back(item);
      }
    });
  }

  void find_references() {
    for_launches(program_, [&](const Launch& launch) {
      if (launch.kind == LaunchKind::sum_sinks) return;
      for (std::int64_t index = launch.first; index < launch.first + launch.count; ++index) {
        if (is_attention(launch.kind)) {
          refer(program_.attend_items[static_cast<std::size_t>(index)]);
        } else {
          RowItem& item = program_.row_items[static_cast<std::size_t>(index)];
          const Plane plane = make_plane(item.batch_first, item.batch_count, item.heads);
          for (RowRef& ref : item.operands) refer(ref, plane, item.rows);
        }
      }
    });
    for (auto& [view, sums] : sums_) {
      sums.is_known = sums.is_known && place(sums);
      views_[builder_.region_of(view)].push_back(view);
    }
  }
  void refer(AttendItem& item) {
    const Slice& slice = item.slice;
    const std::optional<Progression> kv_heads = written_kv_heads(slice.heads, group_);
    const Plane queries = make_plane(slice.batch_first, slice.batch_count, slice.heads);
    const Plane keys = make_plane(slice.batch_first, slice.batch_count, kv_heads.value_or(Progression{}));
    for (RowRef& ref : item.operands) {
      const bool is_key = are_sums(ref) && program_.views[static_cast<std::size_t>(ref.view)].kind != TensorKind::dq;
      refer(ref, is_key ? keys : queries, is_key ? slice.k.count : slice.q.count);
      if (is_key && !kv_heads) sums_[ref.view].is_known = false;
    }
  }
  void refer(RowRef& ref, const Plane& plane, std::int64_t count) {
    if (are_sums(ref)) {
      sums_[ref.view].references.push_back({&ref, make_strip(plane, ref, count), 0});
    } else if (ref.view >= 0 && program_.views[static_cast<std::size_t>(ref.view)].in_arena) {
      is_taken_[static_cast<std::size_t>(builder_.region_of(ref.view))] = true;
    }
  }

  // Whether each reference is inside of one fill, and of one only.
  static bool place(Sums& sums) {
    if (static_cast<std::int64_t>(sums.fills.size() * sums.references.size()) > kMostFillComparisons) return false;
    for (Reference& reference : sums.references) {
      int found = 0;
      for (std::size_t index = 0; index < sums.fills.size(); ++index) {
        if (!is_inside(reference.strip, sums.fills[index])) continue;
        reference.fill = index;
        ++found;
      }
      if (found != 1) return false;
    }
    return true;
  }
  static bool is_inside(const Strip& strip, const RowItem& fill) {
    const RowRef& rows = fill.operands[0];
    const std::int64_t step = fill.rows > 1 ? rows.step : 1;
    const std::int64_t last = strip.row + (strip.count - 1) * strip.step;
    return strip.row >= rows.row && last <= rows.row + (fill.rows - 1) * step && (strip.row - rows.row) % step == 0 &&
           (strip.count == 1 || strip.step % step == 0) && strip.plane.is_inside(fill);
  }

  void compact(RegionId region, const std::vector<std::int32_t>& views) {
    if (is_taken_[static_cast<std::size_t>(region)]) return;
    std::int64_t bytes = 0;
    for (const std::int32_t view : views) {
      const Sums& sums = sums_.at(view);
      if (!sums.is_known) return;
      for (const RowItem& fill : sums.fills) bytes += round_up(bytes_of(fill, view), kViewAlignment);
    }
    if (bytes >= builder_.region_bytes(region)) return;
    builder_.resize(region, bytes);
    std::int64_t offset = 0;
    for (const std::int32_t view : views) {
      Sums& sums = sums_.at(view);
      std::vector<std::int32_t> parts;
      for (const RowItem& fill : sums.fills) {
        View part = program_.views[static_cast<std::size_t>(view)];
        part.offset = offset;
        part.heads = fill.heads;
        part.batch_first = fill.batch_first;
        part.head_stride = part.width;
        part.row_stride = fill.heads.count * part.width;
        part.batch_stride = fill.rows * part.row_stride;
        parts.push_back(builder_.add_view(part, region));
        offset += round_up(bytes_of(fill, view), kViewAlignment);
      }
      for (const Reference& reference : sums.references) {
        const RowItem& fill = sums.fills[reference.fill];
        const std::int64_t step = fill.rows > 1 ? fill.operands[0].step : 1;
        const Strip& strip = reference.strip;
        *reference.ref = {parts[reference.fill], (strip.row - fill.operands[0].row) / step,
                          strip.count > 1 ? strip.step / step : 1};
      }
    }
  }
  std::int64_t bytes_of(const RowItem& fill, std::int32_t view) const {
    return fill.batch_count * fill.heads.count * fill.rows * program_.views[static_cast<std::size_t>(view)].width * 4;
  }

  ProgramBuilder& builder_;
  Program& program_;
  int group_;
  std::vector<bool> is_taken_;                           // by region: messages, or something that is no sums, lie in it
  std::map<std::int32_t, Sums> sums_;                    // by view
  std::map<RegionId, std::vector<std::int32_t>> views_;  // with sums
};

}  // namespace

void compact_sums(ProgramBuilder& builder, int group) { Compactor(builder, group).run(); }

}  // namespace ringspan::internal
