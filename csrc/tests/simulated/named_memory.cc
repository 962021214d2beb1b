#include "tests/simulated/named_memory.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>

namespace horoplug::testing::simulated {
NamedMemory::~NamedMemory() {
  for (const auto& [name, region] : regions_) unmap(region);
}

std::byte* NamedMemory::open(const std::string& name, std::size_t bytes, bool create) {
  const std::lock_guard lock(mutex_);
  const auto known = regions_.find(name);
  if (known != regions_.end()) return known->second.data;
  std::byte* const data = map(name, bytes, create);
  if (data != nullptr) regions_[name] = {data, bytes};
  return data;
}

void NamedMemory::close(const std::string& name) {
  const std::lock_guard lock(mutex_);
  const auto known = regions_.find(name);
  if (known == regions_.end()) return;
  unmap(known->second);
  regions_.erase(known);
}

void NamedMemory::remove(const std::string& name) {
  if (is_shared()) ::unlink((folder_ + "/" + name).c_str());
}

std::byte* NamedMemory::map(const std::string& name, std::size_t bytes, bool create) const {
  bytes = std::max<std::size_t>(bytes, 1);
  if (!is_shared()) {
    if (!create) return nullptr;
    const std::size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
    void* const data = std::aligned_alloc(kAlignment, rounded);
    if (data != nullptr) std::memset(data, 0, rounded);
    return static_cast<std::byte*>(data);
  }
  const int fd =
      ::open((folder_ + "/" + name).c_str(), O_RDWR | O_CLOEXEC | (create ? O_CREAT : 0), 0600);
  if (fd < 0) return nullptr;
  void* data = MAP_FAILED;
  if (!create || ::ftruncate(fd, static_cast<off_t>(bytes)) == 0) {
    data = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  }
  ::close(fd);
  return data == MAP_FAILED ? nullptr : static_cast<std::byte*>(data);
}

void NamedMemory::unmap(const Region& region) const {
  if (is_shared()) {
    ::munmap(region.data, std::max<std::size_t>(region.bytes, 1));
  } else {
    std::free(region.data);
  }
}

}  // namespace horoplug::testing::simulated
