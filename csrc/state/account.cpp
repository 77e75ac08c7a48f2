#include "state/account.h"

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <algorithm>

#include "pool/cpu_pool.h"

namespace delta {

DeviceBytes device_bytes(c10::Device device) {
  const auto stats = c10::getDeviceAllocator(device.type())->getDeviceStats(device.index());
  return {stats.allocated_bytes[0].current, stats.allocated_bytes[0].peak,
          stats.reserved_bytes[0].current, stats.num_alloc_retries};
}

void await_device(c10::Device device) {
  if (!device.is_cpu()) {
    c10::impl::VirtualGuardImpl(device.type()).getStream(device).synchronize();
  }
}

void await_all_streams(c10::Device device) {
  if (!device.is_cpu()) {
    c10::impl::VirtualGuardImpl(device.type()).synchronizeDevice(device.index());
  }
}

int64_t Account::live_bytes() const {
  if (options_.device.is_cpu()) {
    return cpu_pool::live_bytes() + uncounted_bytes_;
  }
  return device_bytes(options_.device).live;
}

int64_t Account::room_for_returns() const {
  return options_.budget_bytes - withheld_bytes() - live_bytes();
}

void Account::note_refused() {
  const int64_t budget = options_.budget_bytes;
  const int64_t withheld = std::min(budget / 2, budget - live_bytes());
  if (withheld > withheld_bytes()) {
    withheld_bytes_.store(withheld, std::memory_order_relaxed);
  }
}

int64_t Account::limit_bytes() const {
  const int64_t passed =
      options_.device.is_cpu() ? cpu_pool::passed_bytes() + uncounted_bytes_ : boundary_peak_bytes_;
  return std::max(options_.budget_bytes, passed);
}

int64_t Account::step_peak_bytes() const {
  if (!options_.device.is_cpu()) {
    return boundary_peak_bytes_;
  }
  return std::max(uncounted_peak_bytes_, cpu_pool::step_peak_bytes() + uncounted_bytes_);
}

void Account::set_budget(int64_t bytes) {
  options_.budget_bytes = bytes;
  if (entered_ && options_.device.is_cpu()) {
    cpu_pool::set_soft_limit(bytes > 0 ? std::max<int64_t>(1, bytes - uncounted_bytes_) : 0);
  }
}

void Account::begin_step() {
  charged_lately_.clear();
  uncharge_tick_ = now_.tick;
  uncounted_peak_bytes_ = 0;
  boundary_peak_bytes_ = 0;
  withheld_bytes_.store(0, std::memory_order_relaxed);
  if (options_.device.is_cpu()) {
    cpu_pool::reset_step_peak();
  }
  cpu_pool::reset_passed();
}

void Account::charge(Page& page, int64_t bytes) {
  if (entered_ && options_.device.is_cpu() && bytes < page.uncounted_bytes) {
    uncounted_peak_bytes_ = step_peak_bytes();  // until now it was there
    cpu_pool::reset_step_peak();
  }
  uncounted_bytes_ += bytes - page.uncounted_bytes;
  page.uncounted_bytes = bytes;
  if (bytes > 0) {
    charged_lately_.push_back(c10::intrusive_ptr<Page>::reclaim_copy(&page));
  }
  if (entered_ && options_.budget_bytes > 0) {
    cpu_pool::set_soft_limit(std::max<int64_t>(1, options_.budget_bytes - uncounted_bytes_));
  }
}

void Account::charge_first_read(Page& page, const c10::Storage& storage) {
  page.outside.unread = false;
  const int64_t bytes =
      options_.device.is_cpu() && !cpu_pool::owns(storage.data_ptr()) ? page.bytes : 0;
  if (bytes != page.uncounted_bytes) {
    charge(page, bytes);
  }
}

void Account::uncharge_gone() {
  if (charged_lately_.empty() || now_.tick < uncharge_tick_) {
    return;
  }
  const auto is_over = [this](const c10::intrusive_ptr<Page>& page) {
    if (page->uncounted_bytes > 0 && page->tickets == 0 && page->weak.expired()) {
      charge(*page, 0);
    }
    return page->uncounted_bytes == 0;
  };
  charged_lately_.erase(std::remove_if(charged_lately_.begin(), charged_lately_.end(), is_over),
                        charged_lately_.end());
  uncharge_tick_ = now_.tick + static_cast<int64_t>(charged_lately_.size() / 32);
}

}  // namespace delta
