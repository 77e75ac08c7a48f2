// Evidence on an accelerator: as in evidence.cpp, but nothing waits for the device inside a step.
//
// Note: two halves
//  1. No op may run under the session's lock, where pages are evicted. A page that is to be hashed
//     is passed over and noted; the lock is let go of, the notes are worked off, and the walk goes
//     on. A hash serves for that round of evictions alone, so that it is of what is freed.
//  2. What came back is noted under the lock too, and hashed before anybody gets it. Both hashes
//     stay on the device. They are read all at once, when the step's gradients are there and before
//     an optimizer uses them: that is the one time that the host waits, in steps that compared
//     something. Which steps compare, after the first two, is the same for all values.
//  3. So what differs has been used by then, unlike on the CPU: the step's gradients are no good,
//     and the error says so.
#include <c10/core/CachingDeviceAllocator.h>

#include <algorithm>
#include <iterator>
#include <sstream>
#include <utility>

#include "state/session.h"
#include "tiers/stream_lane.h"
#include "util/errors.h"

namespace delta {

bool Session::take_device_evidence(Page& page) {
  if (page.went.round == device_evidence_->round && page.went.epoch == page.epoch) {
    page.went.hashed = page.went.row >= 0;
    counters_.unhashed += page.went.hashed ? 0 : 1;
    return page.went.hashed || options_.verify != Verify::Always;
  }
  device_evidence_->to_hash.push_back(c10::intrusive_ptr<Page>::reclaim_copy(&page));
  return false;
}

void Session::begin_evictions() {
  if (device_evidence_) {
    ++device_evidence_->round;
    device_evidence_->to_hash.clear();
  }
}

bool Session::awaits_hash(const Page& page) const {
  return device_evidence_ && !device_evidence_->to_hash.empty() &&
         device_evidence_->to_hash.back().get() == &page;
}

bool Session::take_hashes(Guard& guard) {
  if (!device_evidence_ || device_evidence_->to_hash.empty()) {
    return false;
  }
  struct Item {
    c10::intrusive_ptr<Page> page;
    c10::Storage storage;
    c10::StreamId stream;
    uint64_t epoch;
    int32_t row = -1;
  };
  DeviceEvidence& evidence = *device_evidence_;
  std::vector<Item> items;
  for (auto& page : evidence.to_hash) {
    if (page->tickets > 0 && page->residency() == Residency::Resident && page->strong) {
      const bool known = page->stream != kNoStream;
      items.push_back({page, page->strong,
                       known ? page->stream : current_stream_id(options_.device), page->epoch});
    }
  }
  const uint64_t round = evidence.round;
  evidence.to_hash.clear();
  guard.unlock();
  for (auto& item : items) {
    item.row = evidence.hashes.hash(item.storage, item.stream);
    item.storage = c10::Storage();
  }
  guard.lock();
  for (auto& item : items) {
    forget_hash(item.page->tickets > 0 ? item.page->went.row : item.row);
    if (item.page->tickets > 0) {
      item.page->went.row = item.row;
      item.page->went.round = round;
      item.page->went.epoch = item.epoch;
    }
  }
  items.clear();  // a page may die with this
  return true;
}

void Session::forget_hash(int32_t& row) {
  if (row >= 0) {
    device_evidence_->hashes.give_back(row);
    row = -1;
  }
}

std::shared_ptr<const Suspects> Session::suspects_of(
    const std::vector<c10::intrusive_ptr<OpRecord>>& ops) const {
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

void Session::compare_later(Page& page, const c10::Storage& storage, bool copied,
                            std::shared_ptr<const Suspects> suspects,
                            std::vector<uint64_t> proved) {
  page.went.hashed = false;
  const Value& value = *page.current;
  Comparison noted;
  noted.bytes = page.bytes;
  noted.maker = value.producer ? value.producer->info : nullptr;
  noted.key = evidence_key(value, copied);
  noted.value_keys = {value.trust_key(), value.sequence_key()};
  noted.copied = copied;
  noted.suspects = std::move(suspects);
  noted.proved = std::move(proved);
  noted.went = page.went.row;
  noted.storage = storage;
  noted.stream = current_stream_id(options_.device);
  noted.owner = copied ? page.stream : noted.stream;
  page.went.row = -1;
  device_evidence_->came_back.push_back(std::move(noted));
}

void Session::hash_returned() {
  if (!device_evidence_) {
    return;
  }
  DeviceEvidence& evidence = *device_evidence_;
  std::vector<Comparison> noted;
  {
    Guard guard(*this);
    noted.swap(evidence.came_back);
  }
  if (noted.empty()) {
    return;
  }
  const auto put_by = [&](size_t hashed) {
    Guard guard(*this);
    for (size_t i = 0; i < noted.size(); ++i) {
      if (i >= hashed) {
        evidence.came_back.push_back(std::move(noted[i]));
      } else if (noted[i].came >= 0) {
        evidence.pending.push_back(std::move(noted[i]));
      } else {
        ++counters_.unhashed;
        forget_hash(noted[i].went);
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
      each.came = evidence.hashes.hash(each.storage, each.stream);
      each.storage = c10::Storage();
      ++hashed;
    }
  } catch (...) {
    put_by(hashed);
    throw;
  }
  put_by(hashed);
}

std::string Session::judge() {
  if (!device_evidence_) {
    return {};
  }
  hash_returned();
  DeviceEvidence& evidence = *device_evidence_;
  std::vector<Comparison> pending;
  {
    Guard guard(*this);
    pending.swap(evidence.pending);
  }
  std::vector<Hash128> hashes;
  if (!pending.empty()) {
    try {
      hashes = evidence.hashes.read();
    } catch (...) {  // what went wrong on the device comes up here first
      Guard guard(*this);
      std::move(pending.begin(), pending.end(), std::back_inserter(evidence.pending));
      throw;
    }
  }
  std::ostringstream text;
  int64_t different = 0;
  Guard guard(*this);
  for (auto& each : pending) {
    ++counters_.comparisons;
    const bool same =
        hashes[static_cast<size_t>(each.went)] == hashes[static_cast<size_t>(each.came)];
    forget_hash(each.went);
    forget_hash(each.came);
    if (same) {
      note_same(evidence_[each.key]);
      for (const uint64_t key : each.proved) {
        note_same(evidence_[key]);
      }
      continue;
    }
    ++counters_.mismatches;
    mismatched_ = true;
    for (const uint64_t key : each.value_keys) {
      distrusted_.insert(key);
      trusted_.erase(key);
      if (each.copied) {
        unswappable_.insert(key);
      }
    }
    if (each.suspects) {
      for (const uint64_t key : each.suspects->keys) {
        distrusted_.insert(key);
        trusted_.erase(key);
      }
      for (const auto& source : each.suspects->sources) {
        if (Page* page = find_page(source._unsafe_get_target()); page != nullptr) {
          page->doubts.tainted = true;
        }
      }
    }
    ++anchor_epoch_;
    if (++different > 1) {
      continue;
    }
    text << "delta_runtime: a saved tensor of " << each.bytes << " bytes, made by "
         << (each.maker != nullptr ? each.maker->name : std::string("?"));
    if (each.copied) {
      text << ", was swapped out, and what came back is not what was freed";
    } else {
      text << ", came out different when it was recomputed by"
           << names_of(each.suspects ? each.suspects->ops : std::vector<const OpInfo*>());
    }
  }
  if (different > 1) {
    text << "; and so did " << different - 1 << " more";
  }
  std::string found = text.str();
  if (!found.empty()) {
    found +=
        ". On an accelerator this shows when the step's backward is over: its gradients were "
        "computed with it and must not be used. If an update was made with them already, go back "
        "to weights of before. ";
    found += likely_causes();
  }
  return found;
}

std::string Session::keep_verdict(const std::string& text) {
  Guard guard(*this);
  if (verdict_.empty()) {
    verdict_ = text;
    has_verdict_.store(!text.empty(), std::memory_order_relaxed);
  }
  return verdict_;
}

std::string Session::take_verdict() {
  Guard guard(*this);
  has_verdict_.store(false, std::memory_order_relaxed);
  return std::exchange(verdict_, {});
}

void Session::tell(const std::string& verdict) const {
  if (!verdict.empty()) {
    throw RecomputeMismatchError(verdict);
  }
}

}  // namespace delta
