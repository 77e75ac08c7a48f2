#include "walk/lane_schedule.h"

#include "walk/tuning.h"

namespace delta {
namespace {

constexpr int64_t kUnknownReturn = int64_t{1} << 60;

bool is_busy(const LaneLoad& lane) {
  const double seconds = static_cast<double>(lane.queued_bytes) * lane.seconds_per_byte;
  return seconds > 0 ? seconds > kTuning.horizon_s : lane.queued_bytes > kTuning.horizon_bytes;
}

}  // namespace

void Returns::add(Row& row, int64_t next, const Moment& now, bool as_written) {
  const int64_t use = next >= 0 ? next : kUnknownReturn - row.packed_at;
  row.return_order = {is_timed(row, now, as_written) ? row.return_tick : use, use};
  rows_.insert({{row.return_order, row.id}, &row});
}

std::vector<Row*> Returns::due(const Moment& now, bool as_written, int64_t room_bytes,
                               std::vector<LaneLoad> lanes) const {
  std::vector<Row*> found;
  size_t busy = 0;  // a bit for each tier
  for (const auto& entry : rows_) {
    Row& row = *entry.row;
    const bool timed = is_timed(row, now, as_written);
    if ((now.phase == Phase::Forward && !(as_written && timed)) ||
        busy + 1 == size_t{1} << lanes.size()) {
      break;
    }
    if ((busy >> row.tier & 1) != 0) {
      continue;
    }
    if (timed) {
      if (now.tick < row.return_tick) {
        break;
      }
    } else if (is_busy(lanes[row.tier])) {
      busy |= size_t{1} << row.tier;
      continue;
    }
    if (row.bytes > room_bytes) {
      break;
    }
    room_bytes -= row.bytes;
    lanes[row.tier].queued_bytes += row.bytes;
    found.push_back(&row);
  }
  return found;
}

std::vector<Row*> Returns::all() const {
  std::vector<Row*> found;
  for (const auto& entry : rows_) {
    found.push_back(entry.row);
  }
  return found;
}

void WriteBacks::go_on(bool following, bool time_to, Writer& writer) {
  std::vector<int64_t> later;
  for (size_t looked = 0; !ids_.empty() && looked < kTuning.most_looked_at; ++looked) {
    Row* row = writer.find(ids_.front());
    const bool wanted = row != nullptr && row->exit == Exit::Swap && (!following || row->planned);
    if (wanted && !following && !time_to) {
      break;
    }
    ids_.pop_front();
    if (wanted && !writer.write_back(*row)) {
      later.push_back(row->id);
    }
  }
  ids_.insert(ids_.end(), later.begin(), later.end());  // behind what can go now
}

bool is_early(const Moment& now, int64_t live_bytes, int64_t budget_bytes) {
  return budget_bytes > 0 && now.phase == Phase::Forward &&
         static_cast<double>(live_bytes) >
             kTuning.early_write_back * static_cast<double>(budget_bytes);
}

}  // namespace delta
