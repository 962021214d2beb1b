// The arithmetic of Adasum (Maleki et al., "Scaling Distributed Training with Adaptive Summation",
// MLSys 2021), independent of the exchange of data between ranks.
//
// Two vectors a and b become
//     (1 - a.b / 2|a|^2) a  +  (1 - a.b / 2|b|^2) b
// that is, their sum if they are orthogonal and their average if they are equal; a vector of zeros
// changes nothing. More vectors are combined in a binary tree over the ranks: each with that of
// rank ^ 1, the results with those of rank ^ 2, and so on. Every tensor of a batch is a vector by
// itself.
//
// Several ranks can work on one tensor: every tensor is divided into one slice per rank, and the
// dot products of the slices are added in a binary tree. Neither depends on the composition of a
// batch or on the transport, so the result of a tensor has the same bits alone and fused, on every
// transport.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "collectives/layout.h"
#include "collectives/partition.h"
#include "device/cpu/kernels.h"

namespace horoplug {

// The type of intermediate results: float32 for 16-bit floats, otherwise the tensor's type.
DType adasum_dtype(DType dtype);

DotProducts operator+(const DotProducts& x, const DotProducts& y);

// Converts an intermediate result to the final one. May scale `from` in place.
void finish_adasum(DType dtype, std::byte* to, std::byte* from, std::size_t elements,
                   const Finish& finish);

// A range of consecutive slices.
struct SliceRange {
  int begin = 0;
  int end = 0;

  SliceRange lower_half() const { return {begin, begin + (end - begin) / 2}; }
  SliceRange upper_half() const { return {begin + (end - begin) / 2, end}; }
};

// A batch in slice order: slice 0 of all tensors, then slice 1 of all tensors, and so on. Positions
// are counted in elements.
class AdasumSlices {
 public:
  AdasumSlices(const Layout& layout, int ranks);

  SliceRange all() const { return {0, static_cast<int>(first_.size()) - 1}; }
  std::size_t tensors() const { return tensors_; }
  std::size_t place(int slice) const;
  std::size_t elements(SliceRange range) const { return place(range.end) - place(range.begin); }
  std::size_t largest() const;  // number of elements of the largest slice

  // Like Layout::pack and Layout::unpack, with `part` in bytes in slice order.
  void pack(Part part, std::byte* to) const;
  void unpack(Part part, const std::byte* from) const;

  // By tensor: the dot products of two vectors over a range of 2^n slices. `a` and `b` point to the
  // first of these slices; `dtype` is the type of their elements.
  std::vector<DotProducts> dots(DType dtype, SliceRange range, const std::byte* a,
                                const std::byte* b) const;
  // Combines these slices into `to`, given the dot products of whole tensors. The elements of `to`
  // have the type adasum_dtype(dtype). `to` may be a or b if that is their type.
  void combine(DType dtype, SliceRange range, const std::byte* a, const std::byte* b,
               std::span<const DotProducts> dots, std::byte* to) const;

 private:
  struct TensorSlice {  // a slice of a tensor; never empty
    std::size_t place;
    std::size_t in_layout;
    std::size_t elements;
    std::size_t tensor;
  };
  std::span<const TensorSlice> tensor_slices(SliceRange range) const;
  template <typename Visit>
  void visit(Part part, Visit&& visit) const;

  const Layout& layout_;
  const std::size_t tensors_;
  std::vector<TensorSlice> tensor_slices_;
  std::vector<std::size_t>
      first_;  // the first tensor slice of each slice, and the number of tensor slices
};

}  // namespace horoplug
