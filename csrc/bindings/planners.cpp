#include "bindings/planners.h"

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "bindings/columns.h"
#include "planners/cover.h"
#include "planners/evaluation.h"
#include "planners/presence_search.h"
#include "planners/reruns.h"

namespace delta {
namespace {

const uint8_t* bytes_of(const Mask& mask, int64_t count) {
  planners::check_count(static_cast<size_t>(mask.size()), count);
  return reinterpret_cast<const uint8_t*>(mask.data());
}

planners::Lists lists(const Ints& offsets, const Ints& items) {
  return {copied(offsets), copied(items)};
}

// With the columns that both have in common.
planners::SavedStep saved_step(int64_t n_ops, const Floats& bytes, const Ints& begin,
                               const Ints& own_need, const Ints& parent_offsets,
                               const Ints& parents) {
  return {n_ops, copied(bytes), copied(begin), copied(own_need), lists(parent_offsets, parents)};
}

void bind_reruns(py::module_& m) {
  const auto reruns = [](const Floats& seconds, const Floats& workspace, const Floats& bytes,
                         const Ints& row, const Ints& make_offsets, const Ints& makes,
                         const Ints& read_offsets, const Ints& reads, const Ints& op_offsets,
                         const Ints& ops, bool takes_off) {
    return planners::RerunColumns{copied(seconds),
                                  copied(workspace),
                                  copied(bytes),
                                  copied(row),
                                  lists(make_offsets, makes),
                                  lists(read_offsets, reads),
                                  lists(op_offsets, ops),
                                  takes_off};
  };
  py::class_<planners::RerunColumns>(m, "RerunColumns",
                                     "What making dropped values again takes; "
                                     "csrc/planners/reruns.h. Checked by whoever takes it.")
      .def(py::init(reruns), py::kw_only(), py::arg("seconds"), py::arg("workspace"),
           py::arg("bytes"), py::arg("row"), py::arg("make_offsets"), py::arg("makes"),
           py::arg("read_offsets"), py::arg("reads"), py::arg("op_offsets"), py::arg("ops"),
           py::arg("takes_off"));
}

std::unique_ptr<planners::Evaluation> evaluation(
    const Floats& bytes, const Ints& begin, const Ints& own_need, const Ints& parent_offsets,
    const Ints& parents, const Floats& base, const Floats& spare, const Ints& made_at,
    const Ints& gone, const Ints& use_op, const Ints& use_row, const planners::RerunColumns& reruns,
    const std::vector<Floats>& lanes, const Ints& by_begin) {
  planners::Played played{saved_step(base.size(), bytes, begin, own_need, parent_offsets, parents),
                          copied(base),
                          copied(spare),
                          copied(made_at),
                          copied(gone),
                          copied(use_op),
                          copied(use_row)};
  planners::Lanes laid;
  if (!lanes.empty()) {
    planners::check_count(lanes.size(), 5);
    laid = {copied(lanes[0]), copied(lanes[1]), copied(lanes[2]),
            copied(lanes[3]), copied(lanes[4]), copied(by_begin)};
  }
  return std::make_unique<planners::Evaluation>(std::move(played), reruns, std::move(laid));
}

py::tuple play(planners::Evaluation& self, const Mask& dropped, const Mask& dropped_twice,
               const std::optional<Mask>& swapped) {
  const uint8_t* drops = bytes_of(dropped, self.n_saved());
  const uint8_t* twice = bytes_of(dropped_twice, self.n_saved());
  const uint8_t* swaps = swapped ? bytes_of(*swapped, self.n_saved()) : nullptr;
  planners::Outcome outcome;
  {
    py::gil_scoped_release no_gil;
    outcome = self.play(drops, twice, swaps);
  }
  return py::make_tuple(outcome.seconds, given(outcome.excess), given(outcome.back));
}

void bind_evaluation(py::module_& m) {
  py::class_<planners::Evaluation>(
      m, "Evaluation",
      "Plays backward with a choice; csrc/planners/evaluation.h. For one thread at a time.")
      .def(py::init(&evaluation), py::kw_only(), py::arg("bytes"), py::arg("begin"),
           py::arg("own_need"), py::arg("parent_offsets"), py::arg("parents"), py::arg("base"),
           py::arg("spare"), py::arg("made_at"), py::arg("gone"), py::arg("use_op"),
           py::arg("use_row"), py::arg("reruns"), py::arg("lanes"), py::arg("by_begin"))
      .def("play", &play, py::arg("dropped"), py::arg("dropped_twice"), py::arg("swapped"),
           "Seconds, bytes too much at each op, and the op from which each value is back (-1: "
           "none). Runs without the GIL.");
}

void bind_cover(py::module_& m) {
  py::class_<planners::Cover>(m, "Cover",
                              "The greedy choice of what to drop; csrc/planners/cover.h.")
      .def(py::init([](const Floats& bytes, const Ints& begin, const Ints& own_need,
                       const Ints& parent_offsets, const Ints& parents, const Ints& child_offsets,
                       const Ints& children, const Ints& recipe_offsets, const Ints& recipe_ops,
                       const Floats& rerun_seconds, const Floats& excess, const Mask& droppable,
                       double epsilon_s) {
             const uint8_t* may = bytes_of(droppable, bytes.size());
             return std::make_unique<planners::Cover>(
                 planners::Droppable{
                     saved_step(excess.size(), bytes, begin, own_need, parent_offsets, parents),
                     lists(recipe_offsets, recipe_ops), lists(child_offsets, children),
                     copied(rerun_seconds), copied(excess),
                     std::vector<uint8_t>(may, may + droppable.size())},
                 epsilon_s);
           }),
           py::kw_only(), py::arg("bytes"), py::arg("begin"), py::arg("own_need"),
           py::arg("parent_offsets"), py::arg("parents"), py::arg("child_offsets"),
           py::arg("children"), py::arg("recipe_offsets"), py::arg("recipe_ops"),
           py::arg("rerun_seconds"), py::arg("excess"), py::arg("droppable"), py::arg("epsilon_s"))
      .def("go_on", &planners::Cover::go_on, py::arg("most_gains"),
           py::call_guard<py::gil_scoped_release>(),
           "Go on with the choice; whether it is made. Runs without the GIL.")
      .def("gains", &planners::Cover::gains, "How many were computed.")
      .def("dropped", [](const planners::Cover& self) {
        const auto& dropped = self.dropped();
        py::array_t<bool> found(static_cast<py::ssize_t>(dropped.size()));
        std::copy(dropped.begin(), dropped.end(), found.mutable_data());
        return found;
      });
}

std::unique_ptr<planners::PresenceSearch> presence_search(
    const Floats& bytes, const Floats& seconds, const planners::RerunColumns& reruns,
    const Ints& parent_offsets, const Ints& parents, const Ints& first, const Ints& end,
    const Ints& leaves, const Mask& fixed, const Ints& asked_offsets, const Ints& asked,
    const Ints& pinned_offsets, const Ints& pinned, const Floats& room, const Floats& spare,
    const Floats& rest_room, const Floats& forward_room, const Mask& there) {
  planners::Slots slots{copied(bytes),
                        copied(seconds),
                        lists(parent_offsets, parents),
                        copied(first),
                        copied(end),
                        copied(leaves),
                        flags(fixed),
                        lists(asked_offsets, asked),
                        lists(pinned_offsets, pinned),
                        copied(room),
                        copied(spare),
                        copied(rest_room),
                        copied(forward_room)};
  return std::make_unique<planners::PresenceSearch>(std::move(slots), reruns, flags(there));
}

void bind_presence_search(py::module_& m) {
  using Search = planners::PresenceSearch;
  py::class_<Search>(
      m, "PresenceSearch",
      "Looks for when values are there; csrc/planners/presence_search.h. For one thread at a time.")
      .def(py::init(&presence_search), py::kw_only(), py::arg("bytes"), py::arg("seconds"),
           py::arg("reruns"), py::arg("parent_offsets"), py::arg("parents"), py::arg("first"),
           py::arg("end"), py::arg("leaves"), py::arg("fixed"), py::arg("asked_offsets"),
           py::arg("asked"), py::arg("pinned_offsets"), py::arg("pinned"), py::arg("room"),
           py::arg("spare"), py::arg("rest_room"), py::arg("forward_room"), py::arg("there"))
      .def("go_on", &Search::go_on, py::arg("most_work"), py::arg("most_in_vain"),
           py::call_guard<py::gil_scoped_release>(),
           "Go on with the search; whether it is through. Runs without the GIL.")
      .def("work", &Search::work, "Units of work done.")
      .def(
          "best",
          [](Search& self) {
            const auto found = self.best();
            py::array_t<bool> there(static_cast<py::ssize_t>(found.there.size()));
            std::copy(found.there.begin(), found.there.end(), there.mutable_data());
            return py::make_tuple(found.seconds, found.excess, found.most, there);
          },
          "Seconds, bytes too much in all and where it is worst, and what is there.");
}

}  // namespace

void bind_planners(py::module_& m) {
  auto planners = m.def_submodule("planners", "The inner loops of the planners.");
  bind_reruns(planners);
  bind_evaluation(planners);
  bind_cover(planners);
  bind_presence_search(planners);
}

}  // namespace delta
