#include "rebuild/device_evidence.h"

#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "util/streams.h"

namespace delta {

std::shared_ptr<const Suspects> Suspects::of(const std::vector<c10::intrusive_ptr<OpRecord>>& ops) {
  auto suspects = std::make_shared<Suspects>();
  for (const auto& op : ops) {
    suspects->ops.push_back(op->info);
    for (const auto& out : op->outputs) {
      if (out.value != nullptr) {
        suspects->keys.push_back(out.value->trust_key());
        suspects->keys.push_back(out.value->sequence_key());
      }
    }
    for (const auto& ref : op->inputs) {
      if (!ref.value->producer && ref.value->home != nullptr) {
        suspects->sources.push_back(ref.value->home->weak);
      }
    }
  }
  return suspects;
}

DeviceEvidence::DeviceEvidence(SessionState& state) : Part(state) {
  if (!options_.device.is_cpu()) {
    const c10::OptionalDeviceGuard guard(options_.device);
    table_ = std::make_unique<Table>(options_.device, options_.budget_bytes);
  }
}

void DeviceEvidence::begin_step() {
  if (table_ && options_.verify != Verify::Off) {
    table_->hashes.reserve(current_stream_id(options_.device));
  }
}

bool DeviceEvidence::take(Page& page) {
  if (page.went.round == table_->round && page.went.epoch == page.epoch) {
    page.went.hashed = page.went.row >= 0;
    counters_.unhashed += page.went.hashed ? 0 : 1;
    return page.went.hashed || options_.verify != Verify::Always;
  }
  table_->to_hash.push_back(c10::intrusive_ptr<Page>::reclaim_copy(&page));
  return false;
}

void DeviceEvidence::begin_evictions() {
  if (table_) {
    ++table_->round;
    table_->to_hash.clear();
  }
}

bool DeviceEvidence::awaits_hash(const Page& page) const {
  return table_ && !table_->to_hash.empty() && table_->to_hash.back().get() == &page;
}

bool DeviceEvidence::take_hashes(Guard& guard) {
  if (!table_ || table_->to_hash.empty()) {
    return false;
  }
  struct Item {
    c10::intrusive_ptr<Page> page;
    c10::Storage storage;
    c10::StreamId stream;
    uint64_t epoch;
    int32_t row = -1;
  };
  std::vector<Item> items;
  for (auto& page : table_->to_hash) {
    if (page->tickets > 0 && page->residency() == Residency::Resident && page->strong) {
      const bool known = page->stream != kNoStream;
      items.push_back({page, page->strong,
                       known ? page->stream : current_stream_id(options_.device), page->epoch});
    }
  }
  const uint64_t round = table_->round;
  table_->to_hash.clear();
  guard.unlock();
  for (auto& item : items) {
    item.row = table_->hashes.hash(item.storage, item.stream);
    item.storage = c10::Storage();
  }
  guard.lock();
  for (auto& item : items) {
    forget(item.page->tickets > 0 ? item.page->went.row : item.row);
    if (item.page->tickets > 0) {
      item.page->went.row = item.row;
      item.page->went.round = round;
      item.page->went.epoch = item.epoch;
    }
  }
  items.clear();  // a page may die with this
  return true;
}

std::vector<c10::intrusive_ptr<Page>> DeviceEvidence::waiting() const {
  return table_ ? table_->to_hash : std::vector<c10::intrusive_ptr<Page>>();
}

void DeviceEvidence::forget_waiting() {
  if (table_) {
    table_->to_hash.clear();
  }
}

void DeviceEvidence::forget(int32_t& row) {
  if (row >= 0) {
    table_->hashes.give_back(row);
    row = -1;
  }
}

void DeviceEvidence::compare_later(Page& page, const c10::Storage& storage, uint64_t key,
                                   bool copied, std::shared_ptr<const Suspects> suspects,
                                   std::vector<uint64_t> proved) {
  page.went.hashed = false;
  const Value& value = *page.current;
  Comparison noted;
  noted.bytes = page.bytes;
  noted.maker = value.producer ? value.producer->info : nullptr;
  noted.key = key;
  noted.value_keys = {value.trust_key(), value.sequence_key()};
  noted.copied = copied;
  noted.suspects = std::move(suspects);
  noted.proved = std::move(proved);
  noted.went = page.went.row;
  noted.storage = storage;
  noted.stream = current_stream_id(options_.device);
  noted.owner = copied ? page.stream : noted.stream;
  page.went.row = -1;
  table_->came_back.push_back(std::move(noted));
}

void DeviceEvidence::hash_returned() {
  if (!table_) {
    return;
  }
  std::vector<Comparison> noted;
  {
    Guard guard(lock_);
    noted.swap(table_->came_back);
  }
  if (noted.empty()) {
    return;
  }
  const auto put_by = [&](size_t hashed) {
    Guard guard(lock_);
    for (size_t i = 0; i < noted.size(); ++i) {
      if (i >= hashed) {
        table_->came_back.push_back(std::move(noted[i]));
      } else if (noted[i].came >= 0) {
        table_->pending.push_back(std::move(noted[i]));
      } else {
        ++counters_.unhashed;
        forget(noted[i].went);
      }
    }
  };
  size_t hashed = 0;
  try {
    for (auto& each : noted) {
      if (each.owner != kNoStream && each.owner != each.stream) {
        c10::getDeviceAllocator(options_.device.type())
            ->recordStream(each.storage.data_ptr(),
                           c10::Stream(c10::Stream::UNSAFE, options_.device, each.stream));
      }
      each.came = table_->hashes.hash(each.storage, each.stream);
      each.storage = c10::Storage();
      ++hashed;
    }
  } catch (...) {
    put_by(hashed);
    throw;
  }
  put_by(hashed);
}

std::vector<Comparison> DeviceEvidence::compare(std::optional<Guard>& guard) {
  std::vector<Comparison> pending;
  if (!table_) {
    return pending;
  }
  hash_returned();
  {
    Guard taking(lock_);
    pending.swap(table_->pending);
  }
  if (pending.empty()) {
    return pending;
  }
  std::vector<Hash128> hashes;
  try {
    hashes = table_->hashes.read();
  } catch (...) {  // what went wrong on the device comes up here first
    Guard back(lock_);
    std::move(pending.begin(), pending.end(), std::back_inserter(table_->pending));
    throw;
  }
  guard.emplace(lock_);
  for (auto& each : pending) {
    ++counters_.comparisons;
    each.same = hashes[static_cast<size_t>(each.went)] == hashes[static_cast<size_t>(each.came)];
    forget(each.went);
    forget(each.came);
  }
  return pending;
}

}  // namespace delta
