#include "derived_kernel.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "libstdcxx.h"

namespace horoplug::tensorflow {
namespace {

// tensorflow::kernel_factory::OpKernelFactory: the same virtual functions in the same order.
class Factory {
 public:
  virtual void* create(TF_OpKernelConstruction* construction) = 0;
  virtual ~Factory() = default;
};

// The C++ functions, with their objects as first parameters. Types that are only passed on are
// void. A std::unique_ptr, which is a pointer in every C++ library, or std::function parameter is
// passed as its address.
struct Functions {
  void (*construct_kernel)(void* kernel, TF_OpKernelConstruction*) = nullptr;
  void (*destroy_kernel)(void* kernel) = nullptr;
  void (*construct_builder)(void* builder, const char* op) = nullptr;
  void* (*set_device)(void* builder, const char* device) = nullptr;
  void* (*set_host_memory)(void* builder, const char* argument) = nullptr;
  const void* (*build)(void* builder) = nullptr;
  void (*destroy_builder)(void* builder) = nullptr;
  void (*register_kernel)(void* registrar, const void* definition,
                          libstdcxx::StringView kernel_class,
                          std::unique_ptr<Factory>* factory) = nullptr;
};

// A table of virtual functions: the offset to the complete object, the type, then the functions.
using Table = std::vector<void*>;
constexpr std::size_t kFirst = 2;
constexpr std::size_t kDestroy = kFirst;     // the destructor of a variable
constexpr std::size_t kDelete = kFirst + 1;  // the destructor of an object of `new`
constexpr std::size_t kCompute = kFirst + 2;

constinit Functions functions;
// That of derived kernels; null if there cannot be any. Never freed: kernels may exist until the
// process ends.
constinit Table* table = nullptr;

// A derived kernel. TensorFlow knows its address as that of an OpKernel.
struct DerivedKernel {
  DerivedKernel(const AsyncKernelFunctions& own, TF_OpKernelConstruction* construction)
      : callbacks(own) {
    functions.construct_kernel(base.data(), construction);
    *reinterpret_cast<void***>(base.data()) = table->data() + kFirst;
    kernel = callbacks.create(construction);
  }
  ~DerivedKernel() {
    callbacks.remove(kernel);
    functions.destroy_kernel(base.data());
  }
  DerivedKernel(const DerivedKernel&) = delete;
  DerivedKernel& operator=(const DerivedKernel&) = delete;

  // The virtual functions.
  static void compute(void* self, TF_OpKernelContext* context, TF_AsyncOpKernelDoneCallback* done) {
    const auto* const derived = static_cast<DerivedKernel*>(self);
    derived->callbacks.compute(derived->kernel, context, done);
  }
  static void destroy(void* self) { static_cast<DerivedKernel*>(self)->~DerivedKernel(); }
  static void destroy_and_free(void* self) { delete static_cast<DerivedKernel*>(self); }

  // OpKernel has 240 bytes.
  alignas(std::max_align_t) std::array<std::byte, 1024> base{};
  const AsyncKernelFunctions& callbacks;
  void* kernel = nullptr;
};

class DerivedFactory : public Factory {
 public:
  explicit DerivedFactory(const AsyncKernelFunctions& callbacks) : callbacks_(callbacks) {}
  void* create(TF_OpKernelConstruction* construction) override {
    return new DerivedKernel(callbacks_, construction);
  }

 private:
  const AsyncKernelFunctions& callbacks_;
};

bool find_functions(void* library) {
  // clang-format off
  return
      find(library, "_ZN10tensorflow8OpKernelC2EPNS_20OpKernelConstructionE",
           functions.construct_kernel) &&
      find(library, "_ZN10tensorflow8OpKernelD1Ev", functions.destroy_kernel) &&
      find(library, "_ZN10tensorflow16KernelDefBuilderC1EPKc", functions.construct_builder) &&
      find(library, "_ZN10tensorflow16KernelDefBuilder6DeviceEPKc", functions.set_device) &&
      find(library, "_ZN10tensorflow16KernelDefBuilder10HostMemoryEPKc",
           functions.set_host_memory) &&
      find(library, "_ZN10tensorflow16KernelDefBuilder5BuildEv", functions.build) &&
      find(library, "_ZN10tensorflow16KernelDefBuilderD1Ev", functions.destroy_builder) &&
      find(library,
           "_ZN10tensorflow14kernel_factory17OpKernelRegistrar12InitInternalEPKNS_9KernelDefE"
           "St17basic_string_viewIcSt11char_traitsIcEE"
           "St10unique_ptrINS0_15OpKernelFactoryESt14default_deleteISA_EE",
           functions.register_kernel);
  // clang-format on
}

// A copy of a table of virtual functions; empty if there is none.
Table table_of(void* library, const char* name) {
  void* const address = ::dlsym(library, name);
  Dl_info info{};
  void* found = nullptr;
  if (address == nullptr || ::dladdr1(address, &info, &found, RTLD_DL_SYMENT) == 0) return {};
  if (found == nullptr || info.dli_saddr != address) return {};
  const auto* const symbol = static_cast<const ElfW(Sym)*>(found);
  auto* const first = static_cast<void**>(address);
  return Table(first, first + (symbol->st_size / sizeof(void*)));
}

// The table of derived kernels; empty if AsyncOpKernel is not as expected.
Table derived_table(void* library) {
  const Table base = table_of(library, "_ZTVN10tensorflow8OpKernelE");
  Table derived = table_of(library, "_ZTVN10tensorflow13AsyncOpKernelE");
  if (base.size() <= kCompute || derived.size() <= base.size()) return {};
  const auto is = [&](void* entry, const char* name) { return entry == ::dlsym(library, name); };
  // Compilers may leave out the destructors in the tables of abstract classes.
  const bool destroys_first = (base[kDestroy] == nullptr && base[kDelete] == nullptr) ||
                              (is(base[kDestroy], "_ZN10tensorflow8OpKernelD1Ev") &&
                               is(base[kDelete], "_ZN10tensorflow8OpKernelD0Ev"));
  const bool computes =
      is(derived[kCompute], "_ZN10tensorflow13AsyncOpKernel7ComputeEPNS_15OpKernelContextE");
  // Exists if std::function is libstdc++'s and is what ComputeAsync takes.
  const bool takes_function =
      ::dlsym(library,
              "_ZN10tensorflow6Device12ComputeAsyncEPNS_13AsyncOpKernelEPNS_15OpKernelContextE"
              "St8functionIFvvEE") != nullptr;
  if (!destroys_first || !computes || !takes_function) return {};
  // OpKernel::Compute is pure virtual. All pure virtual functions have the same address.
  void* const pure = base[kCompute];
  if (std::ranges::count(derived, pure) != 1) return {};
  *std::ranges::find(derived, pure) = reinterpret_cast<void*>(&DerivedKernel::compute);
  derived[kDestroy] = reinterpret_cast<void*>(&DerivedKernel::destroy);
  derived[kDelete] = reinterpret_cast<void*>(&DerivedKernel::destroy_and_free);
  return derived;
}

}  // namespace

bool load_derived_kernels(void* library) {
  Table made = find_functions(library) ? derived_table(library) : Table();
  if (!made.empty()) table = new Table(std::move(made));
  return can_derive_kernels();
}

bool can_derive_kernels() { return table != nullptr; }

void register_derived_kernel(const char* op, const char* device,
                             std::span<const std::string> host_arguments,
                             const AsyncKernelFunctions& callbacks) {
  // KernelDefBuilder has one pointer, OpKernelRegistrar no members.
  alignas(void*) std::array<std::byte, 64> builder{};
  functions.construct_builder(builder.data(), op);
  functions.set_device(builder.data(), device);
  for (const std::string& argument : host_arguments) {
    functions.set_host_memory(builder.data(), argument.c_str());
  }
  const void* const definition = functions.build(builder.data());  // TensorFlow deletes it
  functions.destroy_builder(builder.data());
  std::unique_ptr<Factory> factory = std::make_unique<DerivedFactory>(callbacks);
  std::array<std::byte, 1> registrar{};
  functions.register_kernel(registrar.data(), definition, libstdcxx::StringView(op), &factory);
}

void run_derived_done(TF_AsyncOpKernelDoneCallback* done) {
  (*reinterpret_cast<const libstdcxx::Function*>(done))();
}

}  // namespace horoplug::tensorflow
