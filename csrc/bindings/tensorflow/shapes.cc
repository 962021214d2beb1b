// Shape inference: the shapes of an operation's outputs as far as they are known before it runs.
#include <limits>

#include "handles.h"
#include "ops.h"

namespace horoplug::tensorflow {
namespace {

ShapeHandle new_shape() { return ShapeHandle(api().NewShapeHandle()); }

// A vector of unknown length.
ShapeHandle any_vector(TF_ShapeInferenceContext* context) {
  return ShapeHandle(
      api().ShapeInferenceContextVectorFromSize(context, static_cast<std::size_t>(-1)));
}

// Sets `result` to the input's shape with an unknown number of rows; a scalar counts as one row.
// Returns false if the rank of the input is unknown.
bool with_any_rows(const OpRow& row, TF_ShapeInferenceContext* context, TF_ShapeHandle* input,
                   TF_ShapeHandle* result, const CallStatus& call) {
  if (row.op != HP_ALLGATHER) {
    api().ShapeInferenceContextWithRankAtLeast(context, input, 1, input, call.get());
    call.check();
  }
  if (api().ShapeInferenceContextRankKnown(context, input) == 0) return false;
  const ShapeHandle rest = new_shape();
  api().ShapeInferenceContextSubshape(context, input, 1, std::numeric_limits<std::int64_t>::max(),
                                      rest.get(), call.get());
  call.check();
  api().ShapeInferenceContextConcatenateShapes(context, any_vector(context).get(), rest.get(),
                                               result, call.get());
  call.check();
  return true;
}

void infer(const OpRow& row, TF_ShapeInferenceContext* context) {
  const CallStatus call;
  const auto set = [&](int output, const ShapeHandle& shape) {
    api().ShapeInferenceContextSetOutput(context, output, shape.get(), call.get());
    call.check();
  };
  api().ShapeInferenceContextSetUnknownShape(context, call.get());
  call.check();
  if (row.output == Output::kNothing) return;
  if (row.output == Output::kNumber) {
    if (api().ShapeInferenceContextScalar != nullptr) {
      set(0, ShapeHandle(api().ShapeInferenceContextScalar(context)));
    }
    return;
  }
  const int tensors =
      row.tensor_count(static_cast<int>(api().ShapeInferenceContextNumInputs(context)));
  for (int i = 0; i < tensors; ++i) {
    const ShapeHandle input = new_shape();
    api().ShapeInferenceContextGetInput(context, i, input.get(), call.get());
    call.check();
    if (row.output == Output::kLikeInput) {
      set(i, input);
      continue;
    }
    const ShapeHandle result = new_shape();
    if (with_any_rows(row, context, input.get(), result.get(), call)) set(i, result);
    if (row.output == Output::kRowsCounted) set(tensors + i, any_vector(context));
  }
}

}  // namespace

void infer_shapes(const OpRow& row, TF_ShapeInferenceContext* context, TF_Status* status) {
  guarded([&] { infer(row, context); },
          [&](Code code, const char* message) { api().SetStatus(status, code, message); });
}

}  // namespace horoplug::tensorflow
