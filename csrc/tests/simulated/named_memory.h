// Memory regions with names. They are private to this process, or files in a folder through which
// processes share them.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <string>

namespace horoplug::testing::simulated {

inline constexpr std::size_t kAlignment = 512;  // of all allocations of a simulated GPU

class NamedMemory {
 public:
  // With an empty folder, regions are private to this process.
  explicit NamedMemory(std::string folder) : folder_(std::move(folder)) {}
  ~NamedMemory();
  NamedMemory(const NamedMemory&) = delete;
  NamedMemory& operator=(const NamedMemory&) = delete;

  bool is_shared() const { return !folder_.empty(); }
  // Returns the region of this name and size; a new region is zero. A region keeps its address in
  // this process until close(). nullptr if the region does not exist and `create` is false, or if
  // it cannot be created.
  std::byte* open(const std::string& name, std::size_t bytes, bool create = true);
  // Unmaps the region from this process.
  void close(const std::string& name);
  // Deletes the file of the region. Processes that have opened the region keep their mapping.
  void remove(const std::string& name);

 private:
  struct Region {
    std::byte* data;
    std::size_t bytes;
  };
  std::byte* map(const std::string& name, std::size_t bytes, bool create) const;
  void unmap(const Region& region) const;

  std::string folder_;
  std::mutex mutex_;
  std::map<std::string, Region> regions_;
};

}  // namespace horoplug::testing::simulated
