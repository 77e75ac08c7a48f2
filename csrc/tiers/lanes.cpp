#include "tiers/lanes.h"

namespace delta {

double Lane::seconds_for(int64_t bytes) const {
  const LaneTotals sum = totals();
  return sum.bytes > 0 ? sum.busy_s * static_cast<double>(bytes) / static_cast<double>(sum.bytes)
                       : 0;
}

LaneTotals Lane::totals() const {
  std::lock_guard<std::mutex> guard(mutex_);
  return totals_;
}

void Lane::count(const Transfer& transfer) {
  ++totals_.transfers;
  totals_.bytes += transfer.error == 0 ? transfer.bytes : 0;
  totals_.busy_s += transfer.end_s - transfer.begin_s;
  queued_bytes_.fetch_sub(transfer.bytes, std::memory_order_relaxed);
}

}  // namespace delta
