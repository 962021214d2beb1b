#include "ops.h"

#include <string>
#include <utility>
#include <vector>

#include "derived_kernel.h"
#include "handles.h"
#include "kernel.h"

namespace horoplug::tensorflow {
namespace {

// All types with a number in TensorFlow.
const std::string& types() {
  static const std::string text = [] {
    std::string names;
#define HP_DTYPE(code, NAME, Name, name, bytes, family, c_type, mantissa, nccl, since, mpi, numpy, \
                 dlpack, tf, xla)                                                                  \
  if ((tf) >= 0) names += names.empty() ? #name : ", " #name;
#include "horoplug/dtypes.def"
    return "T: {" + names + "}";
  }();
  return text;
}

// The inputs and attributes that stand for one of Takes, in TensorFlow's notation.
struct Parts {
  unsigned takes;
  std::vector<const char*> inputs;
  std::vector<const char*> attributes;
};

std::vector<Parts> parts() {
  return {
      {.takes = kTakesTensor, .inputs = {"tensor: T"}, .attributes = {types().c_str()}},
      {.takes = kTakesTensors,
       .inputs = {"tensors: num_tensors * T"},
       .attributes = {types().c_str(), "num_tensors: int >= 1"}},
      {.takes = kTakesSplits, .inputs = {"splits: int32"}, .attributes = {}},
      {.takes = kTakesName,
       .inputs = {},
       .attributes = {"tensor_name: string = ''", "ignore_name_scope: bool = false"}},
      {.takes = kTakesReduction,
       .inputs = {},
       .attributes = {"reduce_op: int", "prescale_factor: string = '1'",
                      "postscale_factor: string = '1'"}},
      {.takes = kTakesCompression, .inputs = {}, .attributes = {"wire_dtype: int = 0"}},
      {.takes = kTakesLayout, .inputs = {}, .attributes = {"layout: string = ''"}},
      {.takes = kTakesRoot, .inputs = {}, .attributes = {"root_rank: int"}},
      {.takes = kTakesSet, .inputs = {}, .attributes = {"process_set_id: int = 0"}},
  };
}

std::vector<std::string> inputs_of(const OpRow& row) {
  std::vector<std::string> specs;
  for (const Parts& part : parts()) {
    if (row.takes_any(part.takes)) {
      specs.insert(specs.end(), part.inputs.begin(), part.inputs.end());
    }
  }
  return specs;
}

std::vector<std::string> outputs_of(const OpRow& row) {
  if (row.output == Output::kNothing) return {};
  const std::string count = row.takes_any(kTakesTensors) ? "num_tensors * " : "";
  const std::string count_type = row.count_type == kInt64 ? "int64" : "int32";
  const bool is_number = row.output == Output::kNumber;
  std::vector<std::string> specs = {std::string(row.result) + ": " +
                                    (is_number ? count_type : count + "T")};
  if (row.output == Output::kRowsCounted) {
    specs.push_back(std::string(row.counts) + ": " + count + count_type);
  }
  return specs;
}

// The callbacks that TensorFlow calls for one row of the table.
template <std::size_t kIndex>
struct Callbacks {
  static constexpr const OpRow& kRow = kOps[kIndex];

  static void* create(TF_OpKernelConstruction* construction) {
    Kernel* made = nullptr;
    guarded([&] { made = new Kernel(kRow, construction); },
            [&](Code code, const char* message) {
              api().OpKernelConstruction_Failure(construction, CallStatus(code, message).get());
            });
    return made;
  }
  static void remove(void* kernel) { delete static_cast<Kernel*>(kernel); }
  static void run(void* kernel, TF_OpKernelContext* context) {
    compute(*static_cast<Kernel*>(kernel), context);
  }
  static void run_async(void* kernel, TF_OpKernelContext* context,
                        TF_AsyncOpKernelDoneCallback* done) {
    compute_async(*static_cast<Kernel*>(kernel), context, done);
  }
  static void infer(TF_ShapeInferenceContext* context, TF_Status* status) {
    infer_shapes(kRow, context, status);
  }
};

template <std::size_t kIndex>
void define() {
  const OpRow& row = kOps[kIndex];
  TF_OpDefinitionBuilder* const builder = api().NewOpDefinitionBuilder(row.name);
  for (const std::string& spec : inputs_of(row)) {
    api().OpDefinitionBuilderAddInput(builder, spec.c_str());
  }
  for (const std::string& spec : outputs_of(row)) {
    api().OpDefinitionBuilderAddOutput(builder, spec.c_str());
  }
  for (const Parts& part : parts()) {
    if (!row.takes_any(part.takes)) continue;
    for (const char* spec : part.attributes) api().OpDefinitionBuilderAddAttr(builder, spec);
  }
  if (row.query == Query::kNone) {
    api().OpDefinitionBuilderAddAttr(builder, "blocking: bool = false");
  }
  // TensorFlow merges equal stateless operations and evaluates them at graph construction.
  api().OpDefinitionBuilderSetIsStateful(builder, true);
  api().OpDefinitionBuilderSetShapeInferenceFunction(builder, Callbacks<kIndex>::infer);
  const CallStatus status;
  api().RegisterOpDefinition(builder, status.get());
  status.check();
}

// The arguments that TensorFlow copies to the CPU's memory and back if their tensors are on
// another device: all of them.
std::vector<std::string> host_arguments(const OpRow& row) {
  std::vector<std::string> names;
  for (const auto& specs : {inputs_of(row), outputs_of(row)}) {
    for (const std::string& spec : specs) names.push_back(spec.substr(0, spec.find(':')));
  }
  return names;
}

template <std::size_t kIndex>
void define_kernel(const char* device) {
  const OpRow& row = kOps[kIndex];
  using Callback = Callbacks<kIndex>;
  static constexpr AsyncKernelFunctions kFunctions{Callback::create, Callback::run_async,
                                                   Callback::remove};
  const bool may_defer = row.query == Query::kNone || row.query == Query::kDefers;
  if (may_defer && can_derive_kernels()) {
    return register_derived_kernel(row.name, device, host_arguments(row), kFunctions);
  }
  const bool is_async = may_defer && api().NewAsyncKernelBuilder != nullptr;
  TF_KernelBuilder* const builder =
      is_async ? api().NewAsyncKernelBuilder(row.name, device, kFunctions.create,
                                             kFunctions.compute, kFunctions.remove)
               : api().NewKernelBuilder(row.name, device, Callback::create, Callback::run,
                                        Callback::remove);
  for (const std::string& name : host_arguments(row)) {
    api().KernelBuilder_HostMemory(builder, name.c_str());
  }
  const CallStatus status;
  api().RegisterKernelBuilder((std::string(row.name) + device).c_str(), builder, status.get());
  status.check();
}

template <std::size_t... kIndices>
void register_all(std::index_sequence<kIndices...>) {
  (define<kIndices>(), ...);
  (define_kernel<kIndices>("CPU"), ...);
  (define_kernel<kIndices>("GPU"), ...);
}

}  // namespace

void register_ops() { register_all(std::make_index_sequence<kOps.size()>()); }

}  // namespace horoplug::tensorflow
