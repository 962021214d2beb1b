// Memory by name: of this process alone, or in files of a folder that other processes have, too.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <string>

namespace horoplug::testing::simulated {

class NamedMemory {
 public:
  // An empty folder: of this process alone.
  explicit NamedMemory(std::string folder) : folder_(std::move(folder)) {}
  ~NamedMemory();
  NamedMemory(const NamedMemory&) = delete;
  NamedMemory& operator=(const NamedMemory&) = delete;

  bool is_shared() const { return !folder_.empty(); }
  // The region of this name, which has so many bytes, zeros if it is new. nullptr if it is not
  // there and not to be made, or cannot be. Always at the same address in this process.
  std::byte* open(const std::string& name, std::size_t bytes, bool create = true);
  // No longer in this process.
  void close(const std::string& name);
  // Nobody will open it any more; who has it keeps it.
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
