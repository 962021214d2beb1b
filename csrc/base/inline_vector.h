// A vector whose first elements lie in the object itself: most operations have one tensor, and need
// no memory of their own for it.
#pragma once

#include <algorithm>
#include <cstddef>
#include <initializer_list>
#include <memory>
#include <new>
#include <utility>

namespace horoplug {

template <typename T, std::size_t kInline = 1>
class InlineVector {
 public:
  using value_type = T;

  InlineVector() = default;
  InlineVector(const InlineVector&) = delete;
  InlineVector& operator=(const InlineVector&) = delete;
  InlineVector& operator=(std::initializer_list<T> values) {
    assign(values.begin(), values.end());
    return *this;
  }
  ~InlineVector() {
    clear();
    give_back();
  }

  std::size_t size() const { return size_; }
  bool empty() const { return size_ == 0; }
  T* begin() { return data_; }
  T* end() { return data_ + size_; }
  const T* begin() const { return data_; }
  const T* end() const { return data_ + size_; }
  T& operator[](std::size_t i) { return data_[i]; }
  const T& operator[](std::size_t i) const { return data_[i]; }
  T& front() { return *data_; }
  const T& front() const { return *data_; }

  template <typename... Args>
  T& emplace_back(Args&&... args) {
    if (size_ == capacity_) grow(2 * capacity_);
    T* const added = ::new (static_cast<void*>(data_ + size_)) T{std::forward<Args>(args)...};
    ++size_;
    return *added;
  }
  void push_back(T value) { emplace_back(std::move(value)); }
  template <typename Iterator>
  void assign(Iterator first, Iterator last) {
    clear();
    for (; first != last; ++first) push_back(*first);
  }
  // Keeps the memory.
  void clear() {
    std::destroy(begin(), end());
    size_ = 0;
  }

 private:
  static_assert(alignof(T) <= __STDCPP_DEFAULT_NEW_ALIGNMENT__);
  T* own() { return reinterpret_cast<T*>(inline_); }

  void grow(std::size_t capacity) {
    T* const larger = static_cast<T*>(::operator new(capacity * sizeof(T)));
    std::uninitialized_move(begin(), end(), larger);
    std::destroy(begin(), end());
    give_back();
    data_ = larger;
    capacity_ = capacity;
  }
  void give_back() {
    if (data_ != own()) ::operator delete(data_);
  }

  alignas(T) std::byte inline_[kInline * sizeof(T)];
  T* data_ = own();
  std::size_t size_ = 0;
  std::size_t capacity_ = kInline;
};

}  // namespace horoplug
