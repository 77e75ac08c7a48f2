// Python as it stands, whatever torch.compile would make of it.
//
// Note: dynamo and the runtime's Python
//  Where torch.compile gives a function up, dynamo goes on with every frame that runs under it:
//  also with those of the runtime's own Python, which an op or a hook calls. It cannot trace them,
//  and what it raises is none of theirs.
#pragma once

#include <Python.h>

namespace delta {

// While it lives, dynamo leaves the frames of this thread alone. With the GIL.
class PlainFrames {
 public:
  PlainFrames();
  ~PlainFrames();
  PlainFrames(const PlainFrames&) = delete;
  PlainFrames& operator=(const PlainFrames&) = delete;

 private:
  PyObject* before_;  // what dynamo did with frames; nullptr: there is nothing to put back
};

// Looks up what PlainFrames calls; without it they do nothing.
void bind_plain_frames();

}  // namespace delta
