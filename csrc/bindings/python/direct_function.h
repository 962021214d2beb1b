// DirectFunction: a callable of C in place of a public function written in Python, which it knows.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>

#include "direct_call.h"
#include "direct_tensor.h"

namespace horoplug::python {

// What the first argument of a function is.
enum class Takes : int {
  kNothing,  // there are no arguments in a usual call
  kTensor,
  kGroup,  // a list of tensors; it returns one, too
};

// Where the result of a tensor is. The number of rows (first dimension) of the last five may depend
// on the other ranks: the core allocates the result if it does not fit into the output.
enum class DirectOutput : int {
  kNone,       // there is none
  kInput,      // in the tensor, which is overwritten
  kLikeInput,  // in a new tensor like the input
  kSameRows,   // the same, if every rank gives as many rows as this one
  kAllRows,    // in a new tensor for the rows of all ranks, if each gives as many as this one
  kPartRows,   // in one for an even part of the input's rows; the first ranks get the rest
  kRootRows,   // on the root as with kAllRows, and nowhere else
  kCoreRows,   // always in memory of the core
};

// An object of the type. It is made of a description in Python, DirectFunction.__init__ in
// horoplug/_native.pyi, which says what the members are.
struct DirectFunction {
  PyObject head;
  vectorcallfunc vectorcall;
  PyObject* dict;
  PyObject* weak_references;
  // The members of the description that are objects; None for those that it has not.
  PyObject* python;
  PyObject* calls;
  PyObject* tensor_type;
  PyObject* exchange;
  PyObject* empty_like;
  PyObject* empty;
  PyObject* failed;
  PyObject* collect;
  PyObject* prefix;
  PyObject* root;   // interned
  PyObject* named;  // the operations by the names that callers have given; None: no name
  const DirectCalls* shared;
  TensorKind kind;
  Takes takes;
  DirectOutput output;
  std::int32_t operation;
  std::uint32_t reductions;  // bits
  int has_tag;
  int blocks;

  static constexpr auto references() {
    using Self = DirectFunction;
    return std::array{&Self::dict,     &Self::python,     &Self::calls, &Self::tensor_type,
                      &Self::exchange, &Self::empty_like, &Self::empty, &Self::failed,
                      &Self::collect,  &Self::prefix,     &Self::root,  &Self::named};
  }

  bool has_root() const { return root != Py_None; }
  bool overwrites() const { return output == DirectOutput::kInput; }
  bool has_rows() const { return output >= DirectOutput::kSameRows; }
  // How many arguments a usual call may have by position.
  Py_ssize_t most_given() const {
    return takes == Takes::kNothing ? 0 : 1 + (has_root() ? 1 : 0) + has_tag;
  }
};

// Adds DirectFunction to the module.
void add_direct_function(pybind11::module_& module);

}  // namespace horoplug::python
