# Makes a source file that holds the text of the GPU kernels, which NVRTC compiles at run time: kernel_text is its path.
# `path` is relative to `root`, and the name by which the kernels include the file.
function(hp_read_kernel root path result)
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${root}/${path})
  file(READ ${root}/${path} text)
  set(${result} "{\"${path}\", R\"horoplug(${text})horoplug\"}" PARENT_SCOPE)
endfunction()

get_filename_component(hp_csrc ${CMAKE_CURRENT_LIST_DIR}/../.. ABSOLUTE)
file(GLOB hp_kernel_files CONFIGURE_DEPENDS RELATIVE ${hp_csrc}
     ${CMAKE_CURRENT_LIST_DIR}/kernels/*.h ${CMAKE_CURRENT_LIST_DIR}/kernels/*.def)
hp_read_kernel(${hp_csrc}/include horoplug/dtypes.def kernel_headers)
string(APPEND kernel_headers ",\n")
foreach(path ${hp_kernel_files})
  hp_read_kernel(${hp_csrc} ${path} entry)
  string(APPEND kernel_headers "${entry},\n")
endforeach()
hp_read_kernel(${hp_csrc} device/cuda/kernels/kernels.cu kernel_source)
set(kernel_text ${CMAKE_BINARY_DIR}/generated/kernel_text.cc)
configure_file(${CMAKE_CURRENT_LIST_DIR}/jit/source.cc.in ${kernel_text} @ONLY)
