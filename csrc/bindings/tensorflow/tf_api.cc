#include "tf_api.h"

#include <cstdlib>

#include "derived_kernel.h"

namespace horoplug::tensorflow {
namespace {

constexpr const char* kLibrary = "libtensorflow_framework.so.2";

Api functions;

}  // namespace

const char* load_api() {
  void* const library = ::dlopen(kLibrary, RTLD_NOLOAD | RTLD_LAZY);
  if (library == nullptr) return kLibrary;
#define HOROPLUG_TF_FIND(name, result, parameters) \
  if (!find(library, "TF_" #name, functions.name)) return "TF_" #name;
  HOROPLUG_TF_FUNCTIONS(HOROPLUG_TF_FIND)
#undef HOROPLUG_TF_FIND
#define HOROPLUG_TF_TRY(name, result, parameters) find(library, "TF_" #name, functions.name);
  HOROPLUG_TF_OPTIONAL_FUNCTIONS(HOROPLUG_TF_TRY)
#undef HOROPLUG_TF_TRY
  const bool has_both = functions.NewAsyncKernelBuilder != nullptr &&
                        functions.RunAsyncOpKernelDoneCallback != nullptr;
  if (!has_both || kernels_are("synchronous") || kernels_are("derived")) {
    functions.NewAsyncKernelBuilder = nullptr;
    if (!kernels_are("synchronous") && load_derived_kernels(library)) {
      functions.RunAsyncOpKernelDoneCallback = run_derived_done;
    }
  }
  return "";
}

bool kernels_are(std::string_view kind) {
  const char* const wanted = std::getenv("HOROPLUG_TENSORFLOW_KERNELS");
  return wanted != nullptr && wanted == kind;
}

const Api& api() { return functions; }

}  // namespace horoplug::tensorflow
