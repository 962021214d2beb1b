#include "deferred_done.h"

#include <link.h>

#include <utility>

namespace horoplug::tensorflow {
namespace {

// The last argument of a libstdc++ manager to destroy the functor.
constexpr int kDestroy = 3;

struct Search {
  std::uintptr_t address = 0;
  bool found = false;
};

int search_object(dl_phdr_info* object, std::size_t, void* data) {
  auto* const search = static_cast<Search*>(data);
  for (int i = 0; i < object->dlpi_phnum; ++i) {
    const auto& segment = object->dlpi_phdr[i];
    if (segment.p_type != PT_LOAD || (segment.p_flags & PF_X) == 0) continue;
    const std::uintptr_t begin = object->dlpi_addr + segment.p_vaddr;
    search->found |= search->address >= begin && search->address - begin < segment.p_memsz;
  }
  return search->found ? 1 : 0;
}

bool is_code(std::uintptr_t address) {
  Search search{address};
  ::dl_iterate_phdr(search_object, &search);
  return search.found;
}

bool has_expected_layout(const libstdcxx::Function& function) {
  return is_code(reinterpret_cast<std::uintptr_t>(function.manager)) &&
         is_code(reinterpret_cast<std::uintptr_t>(function.invoker));
}

libstdcxx::Function* function_of(TF_AsyncOpKernelDoneCallback* callback) {
  return reinterpret_cast<libstdcxx::Function*>(callback);
}

}  // namespace

bool DeferredDone::can_defer(TF_AsyncOpKernelDoneCallback* callback) {
  static const bool can = has_expected_layout(*function_of(callback)) && !kernels_are("unmovable");
  return can;
}

DeferredDone::DeferredDone(TF_AsyncOpKernelDoneCallback* callback)
    : function_(std::exchange(*function_of(callback), {})) {}

DeferredDone::DeferredDone(DeferredDone&& other) noexcept
    : function_(std::exchange(other.function_, {})) {}

DeferredDone& DeferredDone::operator=(DeferredDone&& other) noexcept {
  std::swap(function_, other.function_);
  return *this;
}

DeferredDone::~DeferredDone() {
  if (function_.manager != nullptr) function_.manager(&function_, &function_, kDestroy);
}

void DeferredDone::operator()() {
  api().RunAsyncOpKernelDoneCallback(reinterpret_cast<TF_AsyncOpKernelDoneCallback*>(&function_));
}

}  // namespace horoplug::tensorflow
