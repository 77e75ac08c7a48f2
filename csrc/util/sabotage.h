// Switches that break one rule each, for the tests that prove that the tests can fail.
#pragma once

#include <atomic>
#include <vector>

namespace delta {

#define DELTA_SABOTAGES(X)                                                                  \
  X(None)                                                                                   \
  X(NoRngRestore)                                                                           \
  X(EmptyAsOp)                                                                              \
  X(InplaceWithoutCopy)                                                                     \
  X(WrappedNumberLost)                                                                      \
  X(PreWriteValue) /* in-place ops are left out at replay */                                \
  X(NoCloneOnWrite)                                                                         \
  X(WrongShortcut)                                                                          \
  X(NoOrderOut)            /* memory is freed while a side stream may still read it */      \
  X(NoOrderIn)             /* memory is used before a side stream has filled it */          \
  X(NoOrderSide)           /* a side stream does not wait for what compute has queued */    \
  X(SharedGenerator)       /* random ops are replayed with the program's own generator */   \
  X(ModesUnseen)           /* ops under a dispatch mode are taken for ordinary ones */      \
  X(SubclassesUnseen)      /* and so are ops on tensors of a class of their own */          \
  X(FactoryContentTrusted) /* what zeros() made is zeros for ever */                        \
  X(RawWritesUnseen)       /* apply_, storage methods, numpy views of a tensor's memory */  \
  X(ForeignMemoryTrusted)  /* memory that others may write to is a source like any other */ \
  X(AliasVersionsUnseen)   /* no version check where aliases count their own versions */    \
  X(CollectivesUnseen)     /* collectives write only what their schema says: nothing */     \
  X(NumericContextLost)    /* flags that change numbers are not put back for a replay */    \
  X(ResizesUnseen)         /* a storage that was resized or re-pointed is the same one */   \
  X(CoverageByCount)       /* as many elements as the storage has: all of it */             \
  X(FreshVersionCounter)   /* unpacked tensors have a version counter of their own */       \
  X(OtherThreadsUnseen)    /* writes of other threads, and under delta.disable() */         \
  X(AuditedForEver)        /* an op that was compared once is never compared again */       \
  X(ReplayOnAnyThread)     /* ops are run again on whatever thread asks */                  \
  X(PythonRandomMoves)     /* ops in Python may move Python's and numpy's generators */

enum class Sabotage : int {
#define DELTA_SABOTAGE_VALUE(name) name,
  DELTA_SABOTAGES(DELTA_SABOTAGE_VALUE)
#undef DELTA_SABOTAGE_VALUE
};
const std::vector<const char*>& sabotage_names();  // by number
inline std::atomic<Sabotage> g_sabotage{Sabotage::None};
inline Sabotage sabotage() { return g_sabotage.load(std::memory_order_relaxed); }
void set_sabotage(Sabotage which);

// Whether host memory that is given back is filled with NaN, for tests of who still reads it.
bool poisons();
void set_poison(bool on);

}  // namespace delta
