// The part of TensorFlow's C API that this library uses. Declared here so that the library builds
// without TensorFlow and runs with any version.
//
// The functions are looked up in TensorFlow's own library, not in the global scope, where not every
// version puts them. So this library links to no version of TensorFlow.
#pragma once

#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <string_view>

// NOLINTBEGIN(readability-identifier-naming,bugprone-macro-parentheses): the names are
// TensorFlow's. The structs are opaque except TF_StringView.
struct TF_AsyncOpKernelDoneCallback;
struct TF_KernelBuilder;
struct TF_OpDefinitionBuilder;
struct TF_OpKernelConstruction;
struct TF_OpKernelContext;
struct TF_ShapeHandle;
struct TF_ShapeInferenceContext;
struct TF_Status;
struct TF_Tensor;
struct TF_StringView {
  const char* data;
  std::size_t len;
};
using TF_DataType = int;  // a C enum with the numbers of TensorFlow's protocol buffers
using TF_Code = int;

namespace horoplug::tensorflow {

enum Code : TF_Code {
  kOk = 0,
  kUnknown = 2,
  kInvalidArgument = 3,
  kResourceExhausted = 8,
  kFailedPrecondition = 9,
  kInternal = 13,
};

using CreateKernel = void* (*)(TF_OpKernelConstruction*);
using Compute = void (*)(void* kernel, TF_OpKernelContext*);
using ComputeAsync = void (*)(void* kernel, TF_OpKernelContext*, TF_AsyncOpKernelDoneCallback*);
using DeleteKernel = void (*)(void* kernel);
using InferShapes = void (*)(TF_ShapeInferenceContext*, TF_Status*);
using Deallocator = void (*)(void* data, std::size_t bytes, void* argument);

// Name, result and parameters of each function. The functions of the second list are missing in
// older versions.
// clang-format off
#define HOROPLUG_TF_FUNCTIONS(X)                                                                   \
  X(NewStatus, TF_Status*, ())                                                                     \
  X(DeleteStatus, void, (TF_Status*))                                                              \
  X(SetStatus, void, (TF_Status*, TF_Code, const char* message))                                   \
  X(GetCode, TF_Code, (const TF_Status*))                                                          \
  X(Message, const char*, (const TF_Status*))                                                      \
  X(NewTensor, TF_Tensor*, (TF_DataType, const std::int64_t* dims, int ndim, void* data,           \
                            std::size_t bytes, Deallocator, void* argument))                       \
  X(AllocateTensor, TF_Tensor*, (TF_DataType, const std::int64_t* dims, int ndim,                  \
                                 std::size_t bytes))                                               \
  X(DeleteTensor, void, (TF_Tensor*))                                                              \
  X(TensorType, TF_DataType, (const TF_Tensor*))                                                   \
  X(NumDims, int, (const TF_Tensor*))                                                              \
  X(Dim, std::int64_t, (const TF_Tensor*, int))                                                    \
  X(TensorData, void*, (const TF_Tensor*))                                                         \
  X(NewOpDefinitionBuilder, TF_OpDefinitionBuilder*, (const char* op))                             \
  X(OpDefinitionBuilderAddAttr, void, (TF_OpDefinitionBuilder*, const char*))                      \
  X(OpDefinitionBuilderAddInput, void, (TF_OpDefinitionBuilder*, const char*))                     \
  X(OpDefinitionBuilderAddOutput, void, (TF_OpDefinitionBuilder*, const char*))                    \
  X(OpDefinitionBuilderSetIsStateful, void, (TF_OpDefinitionBuilder*, bool))                       \
  X(OpDefinitionBuilderSetShapeInferenceFunction, void, (TF_OpDefinitionBuilder*, InferShapes))    \
  X(RegisterOpDefinition, void, (TF_OpDefinitionBuilder*, TF_Status*))                             \
  X(NewKernelBuilder, TF_KernelBuilder*, (const char* op, const char* device, CreateKernel,        \
                                          Compute, DeleteKernel))                                  \
  X(KernelBuilder_HostMemory, void, (TF_KernelBuilder*, const char* argument))                     \
  X(RegisterKernelBuilder, void, (const char* name, TF_KernelBuilder*, TF_Status*))                \
  X(OpKernelConstruction_GetName, TF_StringView, (TF_OpKernelConstruction*))                       \
  X(OpKernelConstruction_GetAttrSize, void, (TF_OpKernelConstruction*, const char*,                \
                                             std::int32_t* list, std::int32_t* bytes, TF_Status*)) \
  X(OpKernelConstruction_GetAttrInt64, void, (TF_OpKernelConstruction*, const char*,               \
                                              std::int64_t*, TF_Status*))                          \
  X(OpKernelConstruction_GetAttrBool, void, (TF_OpKernelConstruction*, const char*,                \
                                             unsigned char*, TF_Status*))                          \
  X(OpKernelConstruction_GetAttrString, void, (TF_OpKernelConstruction*, const char*, char*,       \
                                               std::size_t, TF_Status*))                           \
  X(OpKernelConstruction_Failure, void, (TF_OpKernelConstruction*, TF_Status*))                    \
  X(NumInputs, int, (TF_OpKernelContext*))                                                         \
  X(GetInput, void, (TF_OpKernelContext*, int, TF_Tensor**, TF_Status*))                           \
  X(SetOutput, void, (TF_OpKernelContext*, int, const TF_Tensor*, TF_Status*))                     \
  X(ForwardInputOrAllocateOutput, TF_Tensor*, (TF_OpKernelContext*, const int* inputs, int count,  \
                                               int output, const std::int64_t* dims, int ndim,     \
                                               int* forwarded, TF_Status*))                        \
  X(OpKernelContext_Failure, void, (TF_OpKernelContext*, TF_Status*))                              \
  X(ShapeInferenceContextNumInputs, std::int64_t, (TF_ShapeInferenceContext*))                     \
  X(NewShapeHandle, TF_ShapeHandle*, ())                                                           \
  X(DeleteShapeHandle, void, (TF_ShapeHandle*))                                                    \
  X(ShapeInferenceContextGetInput, void, (TF_ShapeInferenceContext*, int, TF_ShapeHandle*,         \
                                          TF_Status*))                                             \
  X(ShapeInferenceContextSetOutput, void, (TF_ShapeInferenceContext*, int, TF_ShapeHandle*,        \
                                           TF_Status*))                                            \
  X(ShapeInferenceContextVectorFromSize, TF_ShapeHandle*, (TF_ShapeInferenceContext*,              \
                                                           std::size_t))                           \
  X(ShapeInferenceContextRankKnown, int, (TF_ShapeInferenceContext*, TF_ShapeHandle*))             \
  X(ShapeInferenceContextWithRankAtLeast, void, (TF_ShapeInferenceContext*, TF_ShapeHandle*,       \
                                                 std::int64_t, TF_ShapeHandle*, TF_Status*))       \
  X(ShapeInferenceContextSubshape, void, (TF_ShapeInferenceContext*, TF_ShapeHandle*,              \
                                          std::int64_t begin, std::int64_t end, TF_ShapeHandle*,   \
                                          TF_Status*))                                             \
  X(ShapeInferenceContextConcatenateShapes, void, (TF_ShapeInferenceContext*, TF_ShapeHandle*,     \
                                                   TF_ShapeHandle*, TF_ShapeHandle*, TF_Status*))  \
  X(ShapeInferenceContextSetUnknownShape, void, (TF_ShapeInferenceContext*, TF_Status*))
#define HOROPLUG_TF_OPTIONAL_FUNCTIONS(X)                                                          \
  X(NewAsyncKernelBuilder, TF_KernelBuilder*, (const char* op, const char* device, CreateKernel,   \
                                               ComputeAsync, DeleteKernel))                        \
  X(RunAsyncOpKernelDoneCallback, void, (TF_AsyncOpKernelDoneCallback*))                           \
  X(ShapeInferenceContextScalar, TF_ShapeHandle*, (TF_ShapeInferenceContext*))
// clang-format on

// A pointer to each function. The members have the functions' names without "TF_".
struct Api {
#define HOROPLUG_TF_MEMBER(name, result, parameters) result(*name) parameters = nullptr;
  HOROPLUG_TF_FUNCTIONS(HOROPLUG_TF_MEMBER)
  HOROPLUG_TF_OPTIONAL_FUNCTIONS(HOROPLUG_TF_MEMBER)
#undef HOROPLUG_TF_MEMBER
};
// NOLINTEND(readability-identifier-naming,bugprone-macro-parentheses)

// Looks up all functions. Returns what is missing, or an empty string. If NewAsyncKernelBuilder is
// null, kernels are asynchronous only if can_derive_kernels() (see derived_kernel.h). If they are,
// RunAsyncOpKernelDoneCallback is set.
const char* load_api();

// Requires a successful load_api().
const Api& api();

// Looks up a function of a library. Returns whether it is there.
template <typename Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(library, name));
  return function != nullptr;
}

// Whether HOROPLUG_TENSORFLOW_KERNELS has a value. It makes this version behave like others for
// tests: "derived" (the C API has no asynchronous kernels), "synchronous" (nor can they be
// derived), or "unmovable" (the callback has another layout, see deferred_done.h).
bool kernels_are(std::string_view kind);

}  // namespace horoplug::tensorflow
