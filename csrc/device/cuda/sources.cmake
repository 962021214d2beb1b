# Makes a source file that holds the text of the GPU kernels, which NVRTC compiles at run time: kernel_text is its path.
function(hp_read_kernel name result)
  set(path ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/kernels/${name})
  set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${path})
  file(READ ${path} text)
  set(${result} "{\"device/cuda/kernels/${name}\", R\"horoplug(${text})horoplug\"}" PARENT_SCOPE)
endfunction()

file(GLOB hp_kernel_files CONFIGURE_DEPENDS RELATIVE ${CMAKE_CURRENT_LIST_DIR}/kernels
     ${CMAKE_CURRENT_LIST_DIR}/kernels/*.h)
set(kernel_headers "")
foreach(name ${hp_kernel_files})
  hp_read_kernel(${name} entry)
  string(APPEND kernel_headers "${entry},\n")
endforeach()
hp_read_kernel(kernels.cu kernel_source)
set(kernel_text ${CMAKE_BINARY_DIR}/generated/kernel_text.cc)
configure_file(${CMAKE_CURRENT_LIST_DIR}/jit/source.cc.in ${kernel_text} @ONLY)
