// Python sequences of integers as C arrays, without copies to std::vector on the hot path.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory_resource>
#include <string>
#include <utility>
#include <vector>

namespace horoplug::python {

// A sequence of Python objects as an array of borrowed references.
class Items {
 public:
  // `what`: the message of the TypeError if the object is no sequence.
  Items(pybind11::handle sequence, const char* what)
      : fast_(
            pybind11::reinterpret_steal<pybind11::object>(PySequence_Fast(sequence.ptr(), what))) {
    if (!fast_) throw pybind11::error_already_set();
#ifdef Py_GIL_DISABLED
    // Another thread may change a list meanwhile. Copying it takes the list's lock.
    if (PyList_Check(fast_.ptr())) {
      fast_ = pybind11::reinterpret_steal<pybind11::object>(PyList_AsTuple(fast_.ptr()));
      if (!fast_) throw pybind11::error_already_set();
    }
#endif
  }
  Py_ssize_t size() const { return PySequence_Fast_GET_SIZE(fast_.ptr()); }
  PyObject* operator[](Py_ssize_t i) const { return PySequence_Fast_GET_ITEM(fast_.ptr(), i); }

 private:
  pybind11::object fast_;
};

inline std::int64_t to_int64(PyObject* number) {
  const long long value = PyLong_AsLongLong(number);
  if (value == -1 && PyErr_Occurred() != nullptr) throw pybind11::error_already_set();
  return value;
}

inline void* to_pointer(PyObject* number) {
  void* const value = PyLong_AsVoidPtr(number);
  if (value == nullptr && PyErr_Occurred() != nullptr) throw pybind11::error_already_set();
  return value;
}

// Memory for the arrays of one call; small ones stay on the stack.
// The bytes are left uninitialized: clearing them would cost more than their use.
class CallArena {
 public:
  template <typename T>
  T* allocate(Py_ssize_t count) {
    return static_cast<T*>(
        memory_.allocate(static_cast<std::size_t>(count) * sizeof(T), alignof(T)));
  }

  std::pair<const std::int64_t*, std::int32_t> integers(pybind11::handle sequence,
                                                        const char* what) {
    const Items items(sequence, what);
    auto* const values = allocate<std::int64_t>(items.size());
    for (Py_ssize_t i = 0; i < items.size(); ++i) values[i] = to_int64(items[i]);
    return {values, static_cast<std::int32_t>(items.size())};
  }

 private:
  std::array<std::byte, 1024> stack_;
  std::pmr::monotonic_buffer_resource memory_{stack_.data(), stack_.size()};
};

// Pointers into `strings`, which must outlive them.
inline std::vector<const char*> to_c_strings(const std::vector<std::string>& strings) {
  std::vector<const char*> pointers;
  pointers.reserve(strings.size());
  for (const std::string& text : strings) pointers.push_back(text.c_str());
  return pointers;
}

}  // namespace horoplug::python
