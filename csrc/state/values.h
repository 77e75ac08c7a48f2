// Storages (pages), their versions (values), the ops between them (records), and views of them.
//
// Note: who holds what
//  1. A Value is one version of one storage's content. It holds the OpRecord that made it; the
//     record holds the Values that it read. Nothing in that graph holds memory of intermediates.
//  2. A Page is one storage. It knows the value that the storage holds now (`current`), holds the
//     storage weakly, and strongly while a ticket of autograd needs it.
//  3. A value that no recorded op can make again is a *source*. It is held weakly too, until a page
//     is dropped whose recipe needs it: then it is anchored (`Value::anchor`) for as long as a
//     record can reach it.
//  4. The weak reference keeps the StorageImpl's address from being used again, so a page is found
//     by address.
//  5. A value may be *watched*: a hash of its content was taken when it was made or first seen, and
//     is compared at each recorded read. What is watched: memory that others can write to unseen
//     (foreign, or handed out as a numpy array), and what factories made (zeros() is often filled
//     by code that the dispatcher does not see).
//  6. All of this is guarded by the session's lock. Whatever may run foreign code when it dies
//     (storages, kept arguments) is moved to the thread's trash and dies after the unlock.
#pragma once

#include <ATen/Tensor.h>
#include <ATen/core/Generator.h>
#include <c10/core/Storage.h>
#include <c10/core/impl/SizesAndStrides.h>
#include <c10/util/SmallVector.h>
#include <c10/util/intrusive_ptr.h>

#include <utility>
#include <vector>

#include "observe/op_info.h"
#include "observe/random_draws.h"
#include "rebuild/numeric_context.h"
#include "tiers/lanes.h"
#include "util/hash.h"
#include "util/pooled.h"
#include "walk/row.h"

namespace delta {

// dtype, geometry and flags of a tensor over a storage.
struct ViewSpec {
  c10::impl::SizesAndStrides geometry;
  int64_t offset = 0;
  caffe2::TypeMeta dtype;
  bool conj = false;
  bool neg = false;
  bool requires_grad = false;

  static ViewSpec of(const at::Tensor& t);
  bool is_of(const at::Tensor& t) const;  // whether it lies so in its storage
  at::Tensor over(const c10::Storage& storage, c10::Device device) const;
  int64_t storage_bytes() const;  // the least storage that this view fits into
};

struct Page;
struct OpRecord;

// The version counters of a storage's aliases, and where they stood. Tensors that autograd does not
// know as views of each other (the result of _unsafe_view, `.data`) count their writes apart.
class Versions {
 public:
  bool known() const { return !counts_.empty(); }
  void clear() { counts_.clear(); }
  bool unchanged() const {
    for (const auto& each : counts_) {
      if (static_cast<int64_t>(each.counter.current_version()) > each.version) {
        return false;
      }
    }
    return true;
  }
  // All of them, and this one, as they stand now.
  void take(const c10::VariableVersion& counter);
  // Whether the counter is one of them and has moved; one that is new is taken as it stands.
  bool moved(const c10::VariableVersion& counter);
  std::string text() const;  // for messages: expected and found

 private:
  struct Count {
    c10::VariableVersion counter;
    int64_t version;
  };
  void add(const c10::VariableVersion& counter);

  c10::SmallVector<Count, 1> counts_;
};

// Foreign objects whose death has to wait until this thread holds no session's lock.
struct Trash {
  bool locked = false;
  std::vector<c10::Storage> storages;
  std::vector<c10::IValue> values;

  void take(c10::Storage&& storage);
  void take(c10::IValue&& value);
};
Trash& thread_trash();

int64_t live_records();

struct Value : c10::intrusive_ptr_target, Pooled<Value> {
  int64_t key = -1;   // position in its step's order of produced values; see Progress::key_of
  int64_t step = -1;  // that it was produced in; -1: a source
  uint64_t fingerprint = 0;
  int64_t bytes = 0;
  c10::intrusive_ptr<OpRecord> producer;  // null: a source
  int32_t output = -1;                    // index into producer->outputs
  Page* home = nullptr;                   // the page that holds this content now, if any does
  c10::Storage anchor;                    // see Note, rule 3
  bool input = false;                     // existed before any op of this step touched it
  bool spoiled = false;                   // nothing is recomputed from it any more
  bool watched = false;                   // `hash` is of its content: see Note, rule 5
  int32_t depth = 0;                      // ops behind it since something that is kept anyway
  uint64_t sequence = 0;                  // as `fingerprint`, but of the ops' names alone
  Versions versions;                      // of a source
  Hash128 hash;
  const void* anchor_data = nullptr;  // where the anchor's bytes lay when it was anchored
  // scratch of graph walks
  uint64_t mark = 0;
  int8_t mark_state = 0;

  ~Value() override;

  // What an audit's verdict is remembered by, over the steps.
  uint64_t trust_key() const { return mix(fingerprint, static_cast<uint64_t>(output)); }
  // The same for steps of other shapes.
  uint64_t sequence_key() const { return mix(sequence, static_cast<uint64_t>(output)); }

  // Whether the memory of a source still holds this value, as far as can be seen.
  bool readable() const {
    return !spoiled && versions.unchanged() &&
           (!anchor || anchor.data() == anchor_data || sabotage() == Sabotage::ResizesUnseen);
  }
  void set_anchor(c10::Storage storage) {
    anchor = std::move(storage);
    anchor_data = anchor.data();
  }
  bool is_alive() const;  // whether some storage has its content now, as far as is recorded
  // Whether the bytes are those that the value was watched with; they are if it is not watched.
  bool lies_in(const c10::StorageImpl& storage) const;
};
using ToClone = std::vector<c10::intrusive_ptr<Value>>;  // sources, before they are written to

struct ArgumentRef {
  c10::intrusive_ptr<Value> value;
  ViewSpec view;
  int16_t argument;
  int32_t index;  // in a list argument; -1: not a list
  Write write;

  bool needs_content() const { return write != Write::Overwrite && write != Write::Scratch; }
};

struct RecordedOutput {
  Value* value;  // weak: reset by ~Value
  int64_t bytes;
  int16_t position;
  int32_t index;     // in a list; -1: not a list
  bool is_argument;  // a written argument rather than a return value
};

struct OpRecord : c10::intrusive_ptr_target, Pooled<OpRecord> {
  OpInfo* info = nullptr;
  c10::SmallVector<c10::IValue, 6> arguments;  // tensors that `inputs` stand for are None
  c10::SmallVector<ArgumentRef, 3> inputs;
  c10::SmallVector<RecordedOutput, 3> outputs;
  std::vector<RecordedDraw> draws;
  std::vector<Versions> kept_versions;  // of tensors that stay in `arguments` themselves
  NumericContext numbers;
  float seconds = 0;
  int64_t watermark_bytes = 0;
  int64_t tick = 0;          // of the session, when the op ran
  uint64_t walk = 0;         // the last walk of Recipes that came by its inputs
  bool in_reach = false;     // whether all of them were there then, or could be made
  uint32_t anchored_in = 0;  // the epoch of Sources in which its recipe was anchored last
  uint32_t thread = 0;       // that it ran on: see replay_thread.h
  c10::Device device{c10::kCPU};
  bool grad_mode = false;
  at::ScalarType result_dtype = at::ScalarType::Undefined;  // where the op takes it as an argument
  bool keeps_objects = false;
  bool repeats = true;            // false: something was seen that a replay would not meet again
  bool uncertain_behind = false;  // it, or an op behind it, is not certain to repeat

  OpRecord();
  ~OpRecord() override;
};

// A source: a value that no recorded op made.
c10::intrusive_ptr<Value> make_source(int64_t bytes);

enum class Residency : uint8_t {
  Resident,
  Dropped,
  Swapped,     // in a tier below: see Page::copy
  SwappingIn,  // on the way back
  Lost,        // its copy could not be read, and it has no recipe
};

// The bytes of a page in a tier below the device, or on the way there.
struct SwapCopy : c10::intrusive_ptr_target {
  std::shared_ptr<Block> block;
  TransferPtr transfer;
  uint64_t epoch = 0;  // the page's, when the copy began
};

// Memory that others than ops can write to.
struct Outside {
  bool unguarded = false;      // others may write to the page's memory unseen
  int32_t loans = 0;           // arrays that it is unguarded for; 0: it is so for good, if it is
  bool listed = false;         // it is in PageTable's list of foreign pages
  bool unread = false;         // no op has used it yet: it is neither charged nor watched
  bool has_aliases = false;    // there are pages of other storages over the same memory
  bool dear_to_watch = false;  // see OutsideMemory::note_look
  int64_t looked_in_vain_bytes = 0;
};

// With one of these nothing is recomputed from a page, or it is kept.
struct Doubts {
  bool tainted = false;        // a recipe that read it came out different
  bool resized = false;        // its memory comes and goes
  bool being_written = false;  // by an op that runs now
  bool audit_pending = false;  // kept until a rebuild of it was compared
};

// The content that went, to compare with what comes back.
struct Went {
  Hash128 hash;
  bool hashed = false;
  int32_t row = -1;    // on an accelerator: in the table of hashes
  uint64_t round = 0;  // of evictions, and the page's epoch then
  uint64_t epoch = 0;
  bool differs = false;  // the copy came back different, and there was no recipe
  int error = 0;         // or it could not be made or read: an errno
};

// The copy in a tier below, and its way back.
struct Below {
  c10::intrusive_ptr<SwapCopy> copy;
  bool clean_at_once = true;  // nobody had to wait for the copy
  int64_t refused_at = -1;    // SwapTiers::returns() when no tier had room for it
  bool fetching = false;      // somebody makes room for it
  bool prefetched = false;    // brought back before it was asked for, and not used since
  TransferPtr incoming;       // while SwappingIn
  TransferPtr arrival;        // that brought it back, while only streams know when it is over
};

// Its row says whether it leaves, and how; of a page without tickets it says nothing but `bytes`.
struct Page : c10::intrusive_ptr_target, Pooled<Page>, Row {
  c10::weak_intrusive_ptr<c10::StorageImpl> weak;
  c10::Storage strong;  // while tickets > 0; an empty shell while dropped
  c10::intrusive_ptr<Value> current;
  Versions versions;
  const void* data = nullptr;        // where its bytes lay when its content was last looked at
  uint64_t epoch = 0;                // moves on with each new content
  int64_t uncounted_bytes = 0;       // see Account::charge
  int64_t reason_step = -1;          // step in which its kept bytes were counted last
  c10::StreamId stream = kNoStream;  // of an accelerator, that it was made and used on
  bool many_streams = false;         // it was used on others too
  Outside outside;
  Doubts doubts;
  int32_t candidate = -1;  // index in the session's list of resident managed pages
  Went went;
  Below below;

  explicit Page(c10::weak_intrusive_ptr<c10::StorageImpl> w) : weak(std::move(w)) {}
  ~Page() override;

  Residency residency() const { return residency_; }
  // Raises c10::Error, and moves nothing, where the table of legal moves in values.cpp has no such.
  void move_to(Residency next);

  void set_current(c10::intrusive_ptr<Value> value);
  void take_version(const c10::VariableVersion& counter);  // as that of its content now
  void look_at(const c10::StorageImpl& storage);           // how many bytes it has, and where
  bool lies_over(const void* data, int64_t bytes) const;   // any of these
  // Whether the storage's bytes lie elsewhere than they did, or are more or fewer.
  bool was_moved(const c10::StorageImpl& storage) const;
  bool content_unchanged() const;
  bool is_alone() const;  // whether nobody but us, and a copy under way, holds its storage
  void note_stream(c10::Device device);  // that is current: it uses the page

 private:
  Residency residency_ = Residency::Resident;
};

inline c10::StorageImpl* storage_of(const at::Tensor& t) {
  return t.unsafeGetTensorImpl()->unsafe_storage().unsafeGetStorageImpl();
}

// The version of a tensor, or -1 where it has none (inference tensors).
inline int64_t version_of(const at::Tensor& t) {
  auto* impl = t.unsafeGetTensorImpl();
  return impl->is_inference() ? -1
                              : static_cast<int64_t>(impl->version_counter().current_version());
}

// Whether a tensor is made of nothing but a storage and a view, so that it can be made again
// exactly.
bool is_plain(const at::Tensor& t);

}  // namespace delta
