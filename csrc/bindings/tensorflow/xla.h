// Operations inside of functions that XLA compiles: each is a custom call of the program, and
// blocks it. TensorFlow's kernels have no part in that.
//
// XLA has no C interface to make a custom call known, so that two of its C++ functions are looked
// up by their names, and how it is told of a failure is tried out before anything relies on it.
#pragma once

namespace horoplug::tensorflow {

// Makes the custom call "horoplug" known to XLA, once. Returns why that cannot be done; an empty
// string if it has been.
//
// The call's text says what is to be done, in words with spaces between them (xla.cc reads it,
// horoplug/tensorflow/xla.py writes it):
//
//   operation reduce_op root process_set prescale postscale wire_dtype type count {ndim dims…
//   rows}… name
//
// operation: TensorFlow's name for it; type: TensorFlow's number; rows: of the output, for
// operations whose output is not like the input. The name is the rest of the text; it is empty if
// there is none.
//
// Operands are the tensors and then a token, results likewise: a scalar int32 that goes from each
// call to the next and so keeps them in the program's order. Queries have no operands, and their
// number for a result.
const char* register_xla();

}  // namespace horoplug::tensorflow
