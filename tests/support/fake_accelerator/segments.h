// How the simulated accelerator takes memory from the system, cuts it up and puts it together
// again.
//
// Three ways. By default a segment is one block, and serves requests of its own size alone. Or as
// CUDA's caching allocator does it: segments of a few sizes are cut into pieces, and go back to the
// system when all of their pieces are free. Or as that allocator does it with
// `expandable_segments`: each stream has one range of addresses for small requests and one for
// large ones, of which pages are mapped as they are needed; a page goes back when nothing on it is
// in use. CUDA's sizes are divided by `scale`, so that small models show what large ones do there.
//
// Not here: what is in use, statistics, and the lock that all of this needs.
#pragma once

#include <c10/core/Stream.h>
#include <sys/mman.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <map>
#include <set>
#include <tuple>

namespace fake {

constexpr size_t kRounding = 512;  // of the bytes that are asked for

// A part of a segment, between two others of it.
struct Piece {
  char* data = nullptr;
  size_t bytes = 0;
  c10::StreamId stream = 0;  // where it was allocated
  bool small = false;        // its segment serves small requests
  bool free = false;         // in the cache
  bool mapped = true;        // false: addresses without memory
  size_t page_bytes = 0;     // of a segment that grows by pages; 0: it came whole
  int64_t turn = 0;          // when it became free
  Piece* before = nullptr;
  Piece* after = nullptr;
};

// What is free of a stream. With segments that are not cut the last one freed is the first one used
// again; otherwise the smallest that does, and of those the first in memory.
struct FirstFit {
  bool operator()(const Piece* a, const Piece* b) const {
    const auto key = [](const Piece* p) { return std::make_tuple(p->stream, p->small, p->bytes); };
    if (key(a) != key(b)) return key(a) < key(b);
    return a->turn != b->turn ? a->turn > b->turn : a->data < b->data;
  }
};

class Segments {
 public:
  // What is cached must have been given back.
  void set(size_t scale, bool expandable) {
    scale_ = scale;
    expandable_ = expandable;
  }

  size_t reserved_bytes() const { return reserved_bytes_; }

  // A free piece of at least these bytes, which is the caller's now; null where there is none.
  Piece* from_cache(size_t bytes, c10::StreamId stream) {
    Piece least;
    least.stream = stream;
    least.small = is_small(bytes);
    least.bytes = bytes;
    least.turn = std::numeric_limits<int64_t>::max();
    const auto serves = [&](auto entry) {
      return entry != cache_.end() && (*entry)->stream == stream && (*entry)->small == least.small;
    };
    auto found = cache_.lower_bound(&least);
    if (!serves(found)) return nullptr;
    if (!cuts() && (*found)->bytes != bytes) return nullptr;
    // A piece that could grow counts as large as it could become, so that it is used last.
    for (auto next = std::next(found); cuts() && (*found)->page_bytes > 0 && serves(next); ++next) {
      if (bytes_to_come(**next) >= bytes_to_come(**found)) break;
      found = next;
    }
    Piece* piece = *found;
    cache_.erase(found);
    piece->free = false;
    return piece;
  }

  // A piece of at least these bytes, which is the caller's; null where the system would have to
  // give more than `most_bytes` for it.
  Piece* from_system(size_t asked, c10::StreamId stream, size_t most_bytes) {
    if (cuts() && expandable_) return from_addresses(asked, stream, most_bytes);
    const size_t bytes = segment_bytes(asked);
    void* data = nullptr;
    if (bytes > most_bytes || posix_memalign(&data, kAlignment, bytes) != 0) return nullptr;
    reserved_bytes_ += bytes;
    auto* piece = new Piece;
    piece->data = static_cast<char*>(data);
    piece->bytes = bytes;
    piece->stream = stream;
    piece->small = is_small(asked);
    return piece;
  }

  // Leaves what is too much of a piece to the cache, where it is worth it.
  void cut(Piece& piece, size_t bytes) {
    const size_t rest = piece.bytes - bytes;
    const bool any_rest = piece.page_bytes > 0 || is_small(bytes);
    if (!cuts() || (any_rest ? rest < kRounding : rest <= of(1 << 20))) return;
    put_into_cache(*split(piece, bytes));
  }

  // Puts a piece that is no longer in use into the cache, joined with what is free beside it.
  void take_back(Piece& piece) {
    Piece* whole = &piece;
    if (whole->after != nullptr && whole->after->free) {
      cache_.erase(whole->after);
      join(*whole);
    }
    if (whole->before != nullptr && whole->before->free) {
      whole = whole->before;
      cache_.erase(whole);
      join(*whole);
    }
    put_into_cache(*whole);
  }

  // Gives the system all segments and pages on which nothing is in use.
  void drop_cache() {
    const std::set<Piece*, FirstFit> cached = cache_;
    for (Piece* piece : cached) {
      if (piece->page_bytes > 0) {
        unmap(*piece);
      } else if (piece->before == nullptr && piece->after == nullptr) {
        cache_.erase(piece);
        reserved_bytes_ -= piece->bytes;
        std::free(piece->data);
        delete piece;
      }
    }
  }

 private:
  static constexpr size_t kAlignment = 256;
  static constexpr size_t kAddresses = size_t{16} << 30;  // of a segment that grows

  bool cuts() const { return scale_ > 0; }
  size_t of(size_t bytes) const { return bytes / scale_; }
  bool is_small(size_t bytes) const { return cuts() && bytes <= of(1 << 20); }

  size_t segment_bytes(size_t bytes) const {
    if (!cuts()) return bytes;
    if (is_small(bytes)) return of(2 << 20);
    if (bytes < of(10 << 20)) return of(20 << 20);
    return (bytes + of(2 << 20) - 1) / of(2 << 20) * of(2 << 20);
  }

  void put_into_cache(Piece& piece) {
    piece.free = true;
    piece.turn = cuts() ? 0 : ++turn_;
    cache_.insert(&piece);
  }

  // Makes two of a piece; returns the second one.
  static Piece* split(Piece& piece, size_t bytes) {
    auto* rest = new Piece(piece);
    rest->data += bytes;
    rest->bytes -= bytes;
    rest->before = &piece;
    if (rest->after != nullptr) rest->after->before = rest;
    piece.after = rest;
    piece.bytes = bytes;
    return rest;
  }

  // Makes one of a piece and the one behind it.
  static void join(Piece& piece) {
    Piece* gone = piece.after;
    piece.bytes += gone->bytes;
    piece.after = gone->after;
    if (piece.after != nullptr) piece.after->before = &piece;
    delete gone;
  }

  // ---------------------------------------------------------------------- segments that grow

  static size_t bytes_to_come(const Piece& piece) {
    const Piece* after = piece.after;
    return piece.bytes + (after != nullptr && !after->mapped ? after->bytes : 0);
  }

  // The first of a stream's pieces for requests of a kind; nothing is mapped in the beginning.
  Piece* addresses(c10::StreamId stream, bool small) {
    const size_t page_bytes = of(small ? 2 << 20 : 20 << 20);
    Piece*& first = first_[{stream, small, page_bytes}];
    if (first == nullptr) {
      void* data = mmap(nullptr, kAddresses, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (data == MAP_FAILED) return nullptr;
      first = new Piece;
      first->data = static_cast<char*>(data);
      first->bytes = kAddresses / page_bytes * page_bytes;
      first->stream = stream;
      first->small = small;
      first->mapped = false;
      first->page_bytes = page_bytes;
    }
    return first;
  }

  // At the lowest address where enough lies side by side that is free or not mapped.
  Piece* from_addresses(size_t asked, c10::StreamId stream, size_t most_bytes) {
    for (Piece* begin = addresses(stream, is_small(asked)); begin != nullptr;) {
      size_t found = 0, to_map = 0;
      Piece* end = begin;
      for (; end != nullptr && found < asked && (end->free || !end->mapped); end = end->after) {
        if (!end->mapped) to_map += mapped_for(*end, asked - found);
        found += end->bytes;
      }
      if (found >= asked) return to_map <= most_bytes ? &map(*begin, asked) : nullptr;
      begin = end == nullptr ? nullptr : end->after;
    }
    return nullptr;
  }

  static size_t mapped_for(const Piece& piece, size_t bytes) {
    const size_t pages = (bytes + piece.page_bytes - 1) / piece.page_bytes;
    return std::min(piece.bytes, pages * piece.page_bytes);
  }

  // Makes one mapped piece of this one and as many behind it as these bytes need.
  Piece& map(Piece& begin, size_t bytes) {
    for (size_t found = 0; Piece* piece = found == 0 ? &begin : begin.after; found = begin.bytes) {
      if (found >= bytes) break;
      if (piece->mapped) {
        cache_.erase(piece);
        piece->free = false;
      } else {
        const size_t mapped_bytes = mapped_for(*piece, bytes - found);
        if (mapped_bytes < piece->bytes) split(*piece, mapped_bytes);
        piece->mapped = true;
        reserved_bytes_ += mapped_bytes;
      }
      if (piece != &begin) join(begin);
    }
    // What was free behind the last page is now a part of the same piece, as is its rest.
    if (Piece* after = begin.after; after != nullptr && after->free) {
      cache_.erase(after);
      join(begin);
    }
    return begin;
  }

  // Takes the memory from all pages that lie wholly in a free piece.
  void unmap(Piece& piece) {
    Piece* first = &piece;
    while (first->before != nullptr) first = first->before;
    const size_t page = piece.page_bytes;
    const size_t offset = static_cast<size_t>(piece.data - first->data);
    const size_t begin = (offset + page - 1) / page * page;
    const size_t end = (offset + piece.bytes) / page * page;
    if (begin >= end) return;
    cache_.erase(&piece);
    Piece* gone = &piece;
    if (begin > offset) {
      gone = split(piece, begin - offset);
      put_into_cache(piece);
    }
    if (end - begin < gone->bytes) put_into_cache(*split(*gone, end - begin));
    gone->free = false;
    gone->mapped = false;
    reserved_bytes_ -= gone->bytes;
    std::memset(gone->data, 0xFF, gone->bytes);  // who still reads it finds NaN
    if (gone->after != nullptr && !gone->after->mapped) join(*gone);
    if (gone->before != nullptr && !gone->before->mapped) join(*gone->before);
  }

  size_t scale_ = 0;
  bool expandable_ = false;
  size_t reserved_bytes_ = 0;
  std::set<Piece*, FirstFit> cache_;
  int64_t turn_ = 0;
  std::map<std::tuple<c10::StreamId, bool, size_t>, Piece*> first_;
};

}  // namespace fake
