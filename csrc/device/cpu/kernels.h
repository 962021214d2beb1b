// CPU kernels: everything that touches the elements of a tensor on the host.
//
// One table of function pointers per instruction set; kernels() picks the best one that this
// processor has, once. Results are bit-identical between the tables (no fused multiply-add, the
// same order of operations), so that ranks on different processors agree.
#pragma once

#include <cstddef>

#include "base/types.h"
#include "base/wire_format.h"

namespace horoplug {

// What happens to a reduced value before it is stored: value * multiply / divide, in that order; a
// factor of 1 is skipped. Floats of up to 32 bits compute in float32, float64 in float64, and
// complex numbers by their parts. Integers with divide != 1 and multiply == 1 divide exactly and
// truncate towards zero; with multiply != 1, or a divisor that is 0 or no integer, they go through
// float64 and truncate. Both saturate at the type's limits; NaN gives 0. bool ignores both.
struct Finish {
  double multiply = 1.0;
  double divide = 1.0;
  bool is_identity() const { return multiply == 1.0 && divide == 1.0; }
};

// Reduces `sources` arrays of `count` elements, in the order given, into dst:
//     dst[i] = finish(op(...op(op(src[0][i], src[1][i]), src[2][i])..., src[n-1][i]))
// Floats of 8 and 16 bits accumulate in float32 and round once (to nearest even) at the end; what
// is too large for a type without infinities becomes NaN. Complex numbers have no Min and no Max.
// Integers wrap around. bool: Sum and Max are "or", Product and Min are "and" (any non-zero byte is
// true; results are 0 or 1). kAverage is the same as kSum: the division is the caller's, in finish.
// Min and Max give NaN if any operand is NaN. A NaN result is always the positive quiet one without
// payload; one source that needs no finishing is copied, NaNs and all (bool becomes 0 or 1). dst
// may be equal to any one source (exactly, not partially overlapping). sources >= 1.
using ReduceFn = void (*)(void* dst, const void* const* src, int sources, std::size_t count,
                          Finish finish);

// dst[i] = finish(src[i]); dst may equal src.
using ScaleFn = void (*)(void* dst, const void* src, std::size_t count, Finish finish);

// Copies bytes between places that do not overlap. `copy_repeated` is a faster `copy` where the
// processor has fast string instructions, and is `copy` in kernels() there. `stream` writes past
// the caches: for data that is not read soon.
using CopyFn = void (*)(void* dst, const void* src, std::size_t bytes);

// Element-wise conversion from or to float32, to nearest even.
using ConvertFn = void (*)(void* dst, const void* src, std::size_t count);

// The dot products of two vectors, for Adasum; summed in float64.
struct DotProducts {
  double aa = 0, ab = 0, bb = 0;
};
using DotsFn = DotProducts (*)(const void* a, const void* b, std::size_t count);

// dst[i] = of_a * a[i] + of_b * b[i] in float64, rounded to what dst has: float32 for operands of
// 16 bits, the operands' type otherwise. A NaN result is the positive quiet one. dst may be equal
// to an operand of its type.
using BlendFn = void (*)(void* dst, const void* a, const void* b, std::size_t count, double of_a,
                         double of_b);

// Of a wire format: `count` of `encode` and `decode` is in elements of the tensor, from the begin
// of a block on; that of `reduce` in blocks.
struct WireKernels {
  ConvertFn encode, decode;
  ReduceFn reduce[kReduceOpCount];  // nullptr: there is no such reduction
};

struct KernelTable {
  const char* name;  // "avx512", "avx2", "baseline"
  // nullptr: of Adasum, which has `dots` and `blend`, and where a type has no such reduction.
  ReduceFn reduce[kReduceOpCount][kDTypeCount];
  ScaleFn scale[kDTypeCount];
  CopyFn copy, copy_repeated, stream;
  ConvertFn
      from_float32[kDTypeCount];      // of the types narrower than float32; nullptr for the others
  ConvertFn to_float32[kDTypeCount];  // likewise
  DotsFn dots[kDTypeCount];           // where has_adasum(); nullptr for the others
  BlendFn blend[kDTypeCount];         // likewise
  WireKernels wire[kWireFormatCount];

  ConvertFn narrow_to(DType dtype) const { return from_float32[static_cast<int>(dtype)]; }
  ConvertFn widen_from(DType dtype) const { return to_float32[static_cast<int>(dtype)]; }
};

// The table this process uses. HOROPLUG_CPU_KERNELS=baseline|avx2|avx512 forces a lesser one (for
// tests).
const KernelTable& kernels();

// The kernel for elements of a type or, if `wire` is not nullptr, for blocks of a wire format.
inline ReduceFn reduction_of(ReduceOp op, DType dtype, const WireFormat* wire) {
  const KernelTable& table = kernels();
  const auto row = static_cast<int>(op);
  return wire != nullptr ? table.wire[index_of(*wire)].reduce[row]
                         : table.reduce[row][static_cast<int>(dtype)];
}

// All tables that this processor can run, best first; for tests that compare them.
struct KernelTables {
  const KernelTable* tables[3];
  int count;
};
KernelTables available_kernels();

}  // namespace horoplug
