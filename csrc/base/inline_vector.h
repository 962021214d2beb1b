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
  InlineVector(std::initializer_list<T> values) { assign(values.begin(), values.end()); }
  InlineVector(const InlineVector& other) { assign(other.begin(), other.end()); }
  InlineVector& operator=(const InlineVector& other) {
    if (this != &other) assign(other.begin(), other.end());
    return *this;
  }
  InlineVector(InlineVector&& other) noexcept { take(other); }
  InlineVector& operator=(InlineVector&& other) noexcept {
    if (this == &other) return *this;
    clear();
    give_back();
    data_ = own();
    capacity_ = kInline;
    take(other);
    return *this;
  }
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
  void reserve(std::size_t capacity) {
    if (capacity > capacity_) grow(capacity);
  }
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
  // The other one is empty afterwards. This one is empty and has no memory of its own before.
  void take(InlineVector& other) noexcept {
    size_ = std::exchange(other.size_, 0);
    if (other.data_ == other.own()) {
      std::uninitialized_move_n(other.data_, size_, data_);
      std::destroy_n(other.data_, size_);
      return;
    }
    data_ = std::exchange(other.data_, other.own());
    capacity_ = std::exchange(other.capacity_, kInline);
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
