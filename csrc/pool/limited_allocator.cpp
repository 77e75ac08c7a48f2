#include "pool/limited_allocator.h"

#include <unordered_map>

namespace delta {
namespace {

struct Allocators {
  std::mutex mutex;
  std::unordered_map<c10::Device, LimitedAllocator*> of;
};

Allocators& allocators() {
  static auto* all = new Allocators();  // never destroyed: sessions may outlive static objects
  return *all;
}

}  // namespace

LimitedAllocator* limited_allocator(c10::Device device) {
  auto& all = allocators();
  const std::lock_guard<std::mutex> guard(all.mutex);
  const auto found = all.of.find(device);
  return found == all.of.end() ? nullptr : found->second;
}

void set_limited_allocator(c10::Device device, LimitedAllocator* allocator) {
  auto& all = allocators();
  const std::lock_guard<std::mutex> guard(all.mutex);
  all.of[device] = allocator;
}

}  // namespace delta
