# CUDA kernels: lshkit_cuda where they are asked for; their own source on the host for the tests,
# which need no compiler for them.
file(GLOB LSHKIT_CUDA_SOURCES CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/cuda/src/*.cu)

find_program(LSHKIT_NVCC nvcc PATHS $ENV{CUDA_HOME}/bin $ENV{CUDA_PATH}/bin /usr/local/cuda/bin)
set(LSHKIT_HAS_CUDA OFF)
if(LSHKIT_CUDA STREQUAL "ON")
  # Often installed without being on PATH. Handed over as $CUDACXX and not as CMAKE_CUDA_COMPILER,
  # with which check_language would skip its check.
  if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    if(LSHKIT_NVCC)
      set(ENV{CUDACXX} "${LSHKIT_NVCC}")
    endif()
  endif()
  # Machine code for sm_80 and sm_90a, which has products of four warps, and PTX for what comes later.
  if(NOT DEFINED CMAKE_CUDA_ARCHITECTURES AND NOT DEFINED ENV{CUDAARCHS})
    set(CMAKE_CUDA_ARCHITECTURES 80-real 90a-real 90-virtual)
  endif()
  include(CheckLanguage)
  check_language(CUDA)
  if(NOT CMAKE_CUDA_COMPILER)
    message(FATAL_ERROR
      "LSHKIT_CUDA=ON, but no working nvcc was found: put it on PATH, or set CUDACXX or CUDA_HOME")
  endif()
  enable_language(CUDA)
  set(LSHKIT_HAS_CUDA ON)
  find_package(CUDAToolkit REQUIRED)
  add_library(lshkit_cuda STATIC ${LSHKIT_CUDA_SOURCES})
  target_include_directories(lshkit_cuda PRIVATE cuda/include cpp/include)
  list(JOIN CMAKE_CUDA_ARCHITECTURES " " cuda_architectures)
  target_compile_definitions(lshkit_cuda PRIVATE
    LSHKIT_CUDA_ARCHITECTURES="${cuda_architectures}")
  set_target_properties(lshkit_cuda PROPERTIES
    CUDA_STANDARD 17 CUDA_STANDARD_REQUIRED ON CUDA_RUNTIME_LIBRARY Static
    CUDA_VISIBILITY_PRESET hidden)
  # One thread an architecture. For a profiler that names lines: CMAKE_CUDA_FLAGS=-lineinfo.
  if(NOT CMAKE_CUDA_FLAGS MATCHES "--threads=")
    target_compile_options(lshkit_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--threads=0>)
  endif()
  target_link_libraries(lshkit_cuda PRIVATE CUDA::cudart_static)
endif()

# A target with the emulation: its kernels' PTX, translated to C++, in the place of their source.
function(lshkit_by_ptx target)
  if(NOT LSHKIT_NVCC)
    message(FATAL_ERROR "the kernels' PTX was asked for, but no nvcc was found: put it on PATH")
  endif()
  find_package(Python REQUIRED COMPONENTS Interpreter)
  set(translate ${PROJECT_SOURCE_DIR}/cuda/tests/ptx/translate.py)
  file(GLOB headers CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/cuda/include/lshkit/cuda/*
    ${PROJECT_SOURCE_DIR}/cpp/include/lshkit/*)
  foreach(source IN LISTS LSHKIT_CUDA_SOURCES)
    get_filename_component(name ${source} NAME_WE)
    if(name STREQUAL "runtime")  # no kernels
      continue()
    endif()
    set(ptx ${PROJECT_BINARY_DIR}/ptx/${name}.ptx)
    set(translated ${PROJECT_BINARY_DIR}/ptx/${name}.cpp)
    list(APPEND all ${translated})
    if(TARGET lshkit_ptx)
      continue()
    endif()
    add_custom_command(OUTPUT ${ptx}
      COMMAND ${CMAKE_COMMAND} -E make_directory ${PROJECT_BINARY_DIR}/ptx
      COMMAND ${LSHKIT_NVCC} -std=c++17 -O3 -arch=compute_90a -ptx ${source} -o ${ptx}
              -I${PROJECT_SOURCE_DIR}/cuda/include -I${PROJECT_SOURCE_DIR}/cpp/include
      DEPENDS ${source} ${headers} VERBATIM)
    add_custom_command(OUTPUT ${translated}
      COMMAND ${Python_EXECUTABLE} ${translate} ${ptx} ${translated}
      DEPENDS ${ptx} ${translate} VERBATIM)
  endforeach()
  if(NOT TARGET lshkit_ptx)  # of all targets that want them
    add_custom_target(lshkit_ptx DEPENDS ${all})
  endif()
  add_dependencies(${target} lshkit_ptx)
  # As the PTX says and no more: no joined roundings, and integers that wrap.
  set_source_files_properties(${all} PROPERTIES
    COMPILE_OPTIONS "-O1;-fwrapv;-ffp-contract=off;-fno-strict-aliasing;-w"
    INCLUDE_DIRECTORIES ${PROJECT_SOURCE_DIR}/cuda/tests/emulation)
  target_sources(${target} PRIVATE cuda/tests/ptx/run_ptx.cpp ${all})
  target_include_directories(${target} PRIVATE cuda/tests/ptx)
  target_compile_definitions(${target} PRIVATE LSHKIT_EMULATED_PTX=1)
  target_link_libraries(${target} PRIVATE ${CMAKE_DL_LIBS})
endfunction()

function(lshkit_cuda_bindings module)
  target_include_directories(${module} PRIVATE cuda/include)
  if(LSHKIT_CUDA MATCHES "^(EMULATED|PTX)$")
    # Properties of the files that need them: the rest need not be compiled again for a GPU.
    set(emulation cuda/tests/emulation/emulation.cpp cuda/tests/emulation/kernels.cpp)
    target_sources(${module} PRIVATE ${emulation})
    set_source_files_properties(${emulation} PROPERTIES
      INCLUDE_DIRECTORIES ${PROJECT_SOURCE_DIR}/cuda/tests/emulation)
    set_source_files_properties(cpp/bindings/module.cpp PROPERTIES
      COMPILE_DEFINITIONS LSHKIT_EMULATED_CUDA=1)
    target_compile_definitions(${module} PRIVATE LSHKIT_WITH_CUDA=1)
    if(LSHKIT_CUDA STREQUAL "PTX")
      lshkit_by_ptx(${module})
      # The names of kernels are looked up in the module.
      set_property(SOURCE cuda/tests/emulation/kernels.cpp APPEND PROPERTY COMPILE_OPTIONS
        -fvisibility=default -fno-visibility-inlines-hidden)
    endif()
  endif()
  if(NOT LSHKIT_HAS_CUDA)
    return()
  endif()
  target_compile_definitions(${module} PRIVATE LSHKIT_WITH_CUDA=1)
  target_link_libraries(${module} PRIVATE lshkit_cuda)
  set_target_properties(${module} PROPERTIES CUDA_RUNTIME_LIBRARY Static LINKER_LANGUAGE CXX)
endfunction()

# The kernels as C++, in a program of their own tests.
function(lshkit_cuda_test name)
  add_library(${name}_emulation OBJECT cuda/tests/emulation/emulation.cpp)
  file(GLOB tests CONFIGURE_DEPENDS cuda/tests/test_*.cpp)
  add_executable(${name} cuda/tests/emulation/kernels.cpp ${tests})
  target_include_directories(${name} PRIVATE
    cuda/include cuda/tests/emulation cpp/include cpp/tests)
  target_link_libraries(${name} PRIVATE lshkit_core ${name}_emulation)
  target_compile_options(${name} PRIVATE -O1 -g1)
  if(LSHKIT_SANITIZE MATCHES "undefined")
    # No problem here is large enough to overflow, and the checks are a quarter of the compilation.
    target_compile_options(${name} PRIVATE -fno-sanitize=signed-integer-overflow)
  endif()
  if(LSHKIT_SANITIZE)
    # -O1 takes 26 seconds more to compile the checks and saves 4 in the tests.
    set_property(SOURCE cuda/tests/emulation/kernels.cpp APPEND PROPERTY COMPILE_OPTIONS -O0)
  endif()
  set(options "${ARGN}")
  target_compile_options(${name} PRIVATE ${options})
  target_link_options(${name} PRIVATE ${options})
  add_test(NAME ${name} COMMAND ${name})
  set_tests_properties(${name} PROPERTIES TIMEOUT 1800)
endfunction()

# The same by what nvcc makes of the kernels.
function(lshkit_ptx_test)
  lshkit_cuda_test(test_cuda_ptx)
  lshkit_by_ptx(test_cuda_ptx)
  # The names of kernels are looked up in the program.
  set_target_properties(test_cuda_ptx PROPERTIES
    ENABLE_EXPORTS ON CXX_VISIBILITY_PRESET default VISIBILITY_INLINES_HIDDEN OFF)
  # A kernel that the tests do not reach fails them.
  set_tests_properties(test_cuda_ptx PROPERTIES ENVIRONMENT LSHKIT_PTX_ALL=1)
endfunction()

function(lshkit_cuda_tests)
  # By ThreadSanitizer, which finds missing barriers, where the compiler has it and it starts.
  if(NOT LSHKIT_SANITIZE)
    include(CheckCXXSourceRuns)
    set(CMAKE_REQUIRED_FLAGS -fsanitize=thread)
    set(CMAKE_REQUIRED_LINK_OPTIONS -fsanitize=thread)
    check_cxx_source_runs(
      "#include <sanitizer/tsan_interface.h>\nint main() { return !__tsan_get_current_fiber(); }"
      LSHKIT_HAS_THREAD_SANITIZER)
  endif()
  if(LSHKIT_PTX_TESTS)
    lshkit_ptx_test()
  elseif(NOT LSHKIT_HAS_THREAD_SANITIZER)
    lshkit_cuda_test(test_cuda_kernels)
  endif()
  if(LSHKIT_HAS_THREAD_SANITIZER)
    lshkit_cuda_test(test_cuda_races -fsanitize=thread)
    target_compile_definitions(test_cuda_races_emulation PRIVATE LSHKIT_SANITIZE_THREAD=1)
    foreach(race IN ITEMS planted_race planted_race_after_a_vote)
      add_test(NAME cuda_${race}_is_found COMMAND test_cuda_races ${race})
      set_tests_properties(cuda_${race}_is_found PROPERTIES
        PASS_REGULAR_EXPRESSION "ThreadSanitizer: data race" TIMEOUT 1800)
    endforeach()
  endif()
endfunction()
