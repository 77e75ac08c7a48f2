// Columns of numbers, between numpy and C++.
#pragma once

#include <pybind11/numpy.h>
#include <torch/csrc/utils/pybind.h>

#include <cstdint>
#include <vector>

namespace delta {

template <typename T>
using Column = py::array_t<T, py::array::c_style | py::array::forcecast>;
using Ints = Column<int64_t>;
using Floats = Column<double>;
using Mask = Column<bool>;

template <typename T>
std::vector<T> copied(const Column<T>& column) {
  return {column.data(), column.data() + column.size()};
}

inline std::vector<uint8_t> flags(const Mask& mask) {
  return {mask.data(), mask.data() + mask.size()};
}

template <typename T>
py::array_t<T> given(const std::vector<T>& column) {
  return py::array_t<T>(static_cast<py::ssize_t>(column.size()), column.data());
}

}  // namespace delta
