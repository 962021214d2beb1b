// Memory by name: of this process alone, or in files of a folder that other processes have, too.
#pragma once

#include <cstddef>
#include <map>
#include <mutex>
#include <string>

namespace horoplug::testing::simulated {

class Blocks {
 public:
  // An empty folder: of this process alone.
  explicit Blocks(std::string folder) : folder_(std::move(folder)) {}
  ~Blocks();
  Blocks(const Blocks&) = delete;
  Blocks& operator=(const Blocks&) = delete;

  bool is_shared() const { return !folder_.empty(); }
  // The block of this name, which has so many bytes, zeros if it is new. nullptr if it is not there
  // and not to be made, or cannot be. Always at the same address in this process.
  std::byte* open(const std::string& name, std::size_t bytes, bool make = true);
  // No longer in this process.
  void close(const std::string& name);
  // Nobody will open it any more; who has it keeps it.
  void remove(const std::string& name);

 private:
  struct Block {
    std::byte* data;
    std::size_t bytes;
  };
  std::byte* map(const std::string& name, std::size_t bytes, bool make) const;
  void unmap(const Block& block) const;

  std::string folder_;
  std::mutex mutex_;
  std::map<std::string, Block> blocks_;
};

}  // namespace horoplug::testing::simulated
