// Operations inside of functions that XLA compiles. Each is a custom call, which blocks the
// program; TensorFlow's kernels are not used.
//
// XLA has no C interface to register a custom call. Two of its C++ functions are looked up by their
// mangled names, and the way to report a failure is verified before it is used.
#pragma once

namespace horoplug::tensorflow {

// Registers the custom call "horoplug" with XLA, once. Returns why that is impossible, or an empty
// string.
//
// The backend configuration of a call describes the operation in fields separated by spaces
// (written by horoplug/tensorflow/xla.py, read by xla.cc):
//
//   operation reduce_op root process_set prescale postscale wire_dtype type count {ndim dims...
//   rows}... name
//
// operation: the name of TensorFlow's operation; type: TensorFlow's number of the data type; rows:
// of the output if its shape is not that of the input, otherwise -1. The name is the rest of the
// text and may be empty.
//
// The operands are the tensors followed by a token, and so are the results. The token is an int32
// scalar that each call passes to the next one, which keeps calls in the order of the program. A
// query has no operands, and its number as the result.
const char* register_xla();

}  // namespace horoplug::tensorflow
