#include "collectives/adasum/adasum.h"

#include <algorithm>

namespace horoplug {
namespace {

// Slices begin at multiples of this number of elements of their tensor.
constexpr std::size_t kGrain = 16;

// The first element of slice `slice` of a tensor.
std::size_t cut(std::size_t elements, std::size_t slice, std::size_t slices) {
  const std::size_t grains = (elements + kGrain - 1) / kGrain;
  return std::min(grains * slice / slices * kGrain, elements);
}

// The factor of a vector; `square` is its dot product with itself.
double coefficient(double square, double product) {
  return square == 0 ? 1 : 1 - product / (2 * square);
}

}  // namespace

DType adasum_dtype(DType dtype) {
  return dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

DotProducts operator+(const DotProducts& x, const DotProducts& y) {
  return {x.aa + y.aa, x.ab + y.ab, x.bb + y.bb};
}

void finish_adasum(DType dtype, std::byte* to, std::byte* from, std::size_t elements,
                   const Finish& finish) {
  const KernelTable& table = kernels();
  const bool narrows = adasum_dtype(dtype) != dtype;
  table.scale[static_cast<int>(adasum_dtype(dtype))](narrows ? from : to, from, elements, finish);
  if (!narrows) return;
  table.narrow_to(dtype)(to, from, elements);
}

AdasumSlices::AdasumSlices(const Layout& layout, int ranks)
    : layout_(layout), tensors_(layout.tensors()) {
  const std::size_t element = dtype_size(layout.dtype());
  const auto slices = static_cast<std::size_t>(ranks);
  std::size_t place = 0;
  for (std::size_t slice = 0; slice < slices; ++slice) {
    first_.push_back(tensor_slices_.size());
    for (std::size_t tensor = 0; tensor < tensors_; ++tensor) {
      const Part whole = layout.tensor(tensor);
      const std::size_t begin = cut(whole.bytes / element, slice, slices);
      const std::size_t end = cut(whole.bytes / element, slice + 1, slices);
      if (begin == end) continue;
      tensor_slices_.push_back({place, whole.begin / element + begin, end - begin, tensor});
      place += end - begin;
    }
  }
  first_.push_back(tensor_slices_.size());
}

std::size_t AdasumSlices::place(int slice) const {
  const std::size_t part_of_tensor = first_[static_cast<std::size_t>(slice)];
  return part_of_tensor < tensor_slices_.size() ? tensor_slices_[part_of_tensor].place
                                                : layout_.bytes() / dtype_size(layout_.dtype());
}

std::size_t AdasumSlices::largest() const {
  std::size_t most = 0;
  for (int slice = 0; slice < all().end; ++slice) {
    most = std::max(most, elements({slice, slice + 1}));
  }
  return most;
}

std::span<const AdasumSlices::TensorSlice> AdasumSlices::tensor_slices(SliceRange range) const {
  const std::size_t begin = first_[static_cast<std::size_t>(range.begin)];
  const std::size_t end = first_[static_cast<std::size_t>(range.end)];
  return std::span(tensor_slices_).subspan(begin, end - begin);
}

// Calls visit(position in the layout, position in the part, bytes), all in bytes.
template <typename Visit>
void AdasumSlices::visit(Part part, Visit&& visit) const {
  const std::size_t element = dtype_size(layout_.dtype());
  auto part_of_tensor =
      std::upper_bound(tensor_slices_.begin(), tensor_slices_.end(), part.begin / element,
                       [](std::size_t at, const TensorSlice& p) { return at < p.place; });
  if (part_of_tensor != tensor_slices_.begin()) --part_of_tensor;
  const std::size_t end = part.begin + part.bytes;
  for (; part_of_tensor != tensor_slices_.end() && part_of_tensor->place * element < end;
       ++part_of_tensor) {
    const std::size_t begin = part_of_tensor->place * element;
    const std::size_t from = std::max(part.begin, begin);
    const std::size_t to = std::min(end, begin + part_of_tensor->elements * element);
    if (from < to)
      visit(part_of_tensor->in_layout * element + (from - begin), from - part.begin, to - from);
  }
}

void AdasumSlices::pack(Part part, std::byte* to) const {
  visit(part, [&](std::size_t at, std::size_t there, std::size_t bytes) {
    layout_.pack(at, bytes, to + there);
  });
}

void AdasumSlices::unpack(Part part, const std::byte* from) const {
  visit(part, [&](std::size_t at, std::size_t there, std::size_t bytes) {
    layout_.unpack(at, bytes, from + there);
  });
}

std::vector<DotProducts> AdasumSlices::dots(DType dtype, SliceRange range, const std::byte* a,
                                            const std::byte* b) const {
  const std::size_t element = dtype_size(dtype);
  if (range.end - range.begin > 1) {
    const SliceRange lower = range.lower_half();
    const SliceRange upper = range.upper_half();
    const std::size_t skipped = elements(lower) * element;
    auto sums = dots(dtype, lower, a, b);
    const auto more = dots(dtype, upper, a + skipped, b + skipped);
    for (std::size_t i = 0; i < sums.size(); ++i) sums[i] = sums[i] + more[i];
    return sums;
  }
  const DotsFn kernel = kernels().dots[static_cast<int>(dtype)];
  std::vector<DotProducts> sums(tensors_);
  for (const TensorSlice& part_of_tensor : tensor_slices(range)) {
    const std::size_t at = (part_of_tensor.place - place(range.begin)) * element;
    sums[part_of_tensor.tensor] = kernel(a + at, b + at, part_of_tensor.elements);
  }
  return sums;
}

void AdasumSlices::combine(DType dtype, SliceRange range, const std::byte* a, const std::byte* b,
                           std::span<const DotProducts> dots, std::byte* to) const {
  const BlendFn kernel = kernels().blend[static_cast<int>(dtype)];
  for (const TensorSlice& part_of_tensor : tensor_slices(range)) {
    const std::size_t at = part_of_tensor.place - place(range.begin);
    const DotProducts& products = dots[part_of_tensor.tensor];
    kernel(to + at * dtype_size(adasum_dtype(dtype)), a + at * dtype_size(dtype),
           b + at * dtype_size(dtype), part_of_tensor.elements,
           coefficient(products.aa, products.ab), coefficient(products.bb, products.ab));
  }
}

}  // namespace horoplug
