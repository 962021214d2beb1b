// All kernels: a name, and what it is made from.
//
// Names are made of those of data types and reductions, see dtype_name() and reduce_op_name():
// copy_<bits>, scale_<dtype>, cast_<from>_<to>, reduce_<op>_<dtype>, dots_<dtype>, sum_of_tiles,
// blend_<dtype>.
#pragma once

// clang-format off
#define HOROPLUG_GPU_REDUCTIONS(REDUCE, dtype, Element) \
  REDUCE(reduce_sum_##dtype, Element, Sum)              \
  REDUCE(reduce_product_##dtype, Element, Product)      \
  REDUCE(reduce_min_##dtype, Element, Min)              \
  REDUCE(reduce_max_##dtype, Element, Max)

#define HOROPLUG_GPU_KERNELS(MOVE, REDUCE, DOTS, SUM, BLEND) \
  MOVE(copy_8, Raw8, Raw8)                                   \
  MOVE(copy_16, Raw16, Raw16)                                \
  MOVE(copy_32, Raw32, Raw32)                                \
  MOVE(copy_64, Raw64, Raw64)                                \
  MOVE(scale_uint8, U8, U8)                                  \
  MOVE(scale_int8, I8, I8)                                   \
  MOVE(scale_uint16, U16, U16)                               \
  MOVE(scale_int16, I16, I16)                                \
  MOVE(scale_uint32, U32, U32)                               \
  MOVE(scale_int32, I32, I32)                                \
  MOVE(scale_uint64, U64, U64)                               \
  MOVE(scale_int64, I64, I64)                                \
  MOVE(scale_float16, F16, F16)                              \
  MOVE(scale_bfloat16, BF16, BF16)                           \
  MOVE(scale_float32, F32, F32)                              \
  MOVE(scale_float64, F64, F64)                              \
  MOVE(cast_float32_float16, F32, F16)                       \
  MOVE(cast_float32_bfloat16, F32, BF16)                     \
  MOVE(cast_float16_float32, F16, F32)                       \
  MOVE(cast_bfloat16_float32, BF16, F32)                     \
  HOROPLUG_GPU_REDUCTIONS(REDUCE, uint8, U8)                 \
  HOROPLUG_GPU_REDUCTIONS(REDUCE, int8, I8)                  \
  HOROPLUG_GPU_REDUCTIONS(REDUCE, uint16, U16)               \
  HOROPLUG_GPU_REDUCTIONS(REDUCE, int16, I16)                \
  HOROPLUG_GPU_REDUCTIONS(REDUCE, uint32, U32)               \
  HOROPLUG_GPU_REDUCTIONS(REDUCE, int32, I32)                \
  HOROPLUG_GPU_REDUCTIONS(REDUCE, uint64, U64)               \
  HOROPLUG_GPU_REDUCTIONS(REDUCE, int64, I64)                \
  HOROPLUG_GPU_REDUCTIONS(REDUCE, float16, F16)              \
  HOROPLUG_GPU_REDUCTIONS(REDUCE, bfloat16, BF16)            \
  HOROPLUG_GPU_REDUCTIONS(REDUCE, float32, F32)              \
  HOROPLUG_GPU_REDUCTIONS(REDUCE, float64, F64)              \
  HOROPLUG_GPU_REDUCTIONS(REDUCE, bool, Bool)                \
  DOTS(dots_float16, F16)                                    \
  DOTS(dots_bfloat16, BF16)                                  \
  DOTS(dots_float32, F32)                                    \
  DOTS(dots_float64, F64)                                    \
  SUM(sum_of_tiles)                                          \
  BLEND(blend_float16, F16, F32)                             \
  BLEND(blend_bfloat16, BF16, F32)                           \
  BLEND(blend_float32, F32, F32)                             \
  BLEND(blend_float64, F64, F64)
// clang-format on
