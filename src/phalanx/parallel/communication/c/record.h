// What is written into the flight record: collectives, and the sums of steps.
#pragma once
#include "places.h"

static int64_t *numbers_at(Notes *self, size_t place) { return (int64_t *)((char *)self->memory.buf + place); }

static Record *record_of(Notes *self, int64_t number) {
  return (Record *)((char *)self->memory.buf + RECORDS_AT) + number % RECORDS;
}

// Of a group: collectives launched there, and come to.
static int64_t *counts_of(Notes *self, int64_t row) {
  return numbers_at(self, GROUPS_AT + GROUP_SIZE + (size_t)row * GROUP_BYTES);
}

static void came(Notes *self, int64_t row, int64_t sequence) {
  int64_t *counts = counts_of(self, row);
  if (counts[1] < sequence) counts[1] = sequence;
}

static int read_clock(Notes *self, int64_t *now) {
  if (!self->clock) {
    struct timespec time;
    clock_gettime(CLOCK_REALTIME, &time);
    *now = (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
    return 0;
  }
  PyObject *found = PyObject_CallNoArgs(self->clock);
  if (!found) return -1;
  *now = PyLong_AsLongLong(found);
  Py_DECREF(found);
  return *now == -1 && PyErr_Occurred() ? -1 : 0;
}

// Its number is 0 while it is written, and is written last.
static void write_record(Notes *self, Record *content) {
  Record *place = record_of(self, content->number);
  int64_t number = content->number;
  __atomic_store_n(&place->number, 0, __ATOMIC_RELEASE);
  __atomic_thread_fence(__ATOMIC_SEQ_CST);
  memcpy(place, content, offsetof(Record, number));
  __atomic_store_n(&place->number, number, __ATOMIC_RELEASE);
}

static int kind_number(PyObject *kind) {
  PyObject *number = PyDict_GetItemWithError(kinds, kind);
  if (!number && !PyErr_Occurred()) PyErr_SetObject(PyExc_KeyError, kind);
  return number ? (int)PyLong_AsLong(number) : -1;
}

static int row_of(Notes *self, PyObject *group, PyObject *axis, PyObject *size) {
  PyObject *row = PyDict_GetItemWithError(self->groups, group);
  if (row) return (int)PyLong_AsLong(row);
  if (PyErr_Occurred()) return -1;
  return to_int(PyObject_CallMethodObjArgs(self->places, word_new_group, group, axis, size, NULL));
}

// How many dims are told, and four numbers of them; of more dims the last is of all that follow. Elements in all.
static int told(PyObject *tensor, Record *record, int64_t *elements) {
  PyObject *shape = read_attribute(tensor, &shape_of);
  if (!shape) return -1;
  if (!PyTuple_Check(shape)) {
    PyErr_Format(PyExc_TypeError, "a shape is a tuple, not %R", shape);
    Py_DECREF(shape);
    return -1;
  }
  Py_ssize_t dims = PyTuple_GET_SIZE(shape);
  int64_t first[4] = {0, 0, 0, 0};
  *elements = 1;
  for (Py_ssize_t dim = 0; dim < dims; ++dim) {
    int64_t size = PyLong_AsLongLong(PyTuple_GET_ITEM(shape, dim));
    if (size == -1 && PyErr_Occurred()) break;
    *elements *= size;
    if (dim <= 3)
      first[dim] = size;
    else
      first[3] *= size;
  }
  Py_DECREF(shape);
  if (PyErr_Occurred()) return -1;
  for (int i = 0; i < 4; ++i) record->shape[i] = first[i] > (int64_t)LARGEST ? LARGEST : (uint32_t)first[i];
  return dims > 4 ? 4 : (int)dims;
}

static int64_t bytes_of(PyObject *tensor) {
  PyObject *found = PyObject_GetAttr(tensor, word_nbytes);
  int64_t bytes = found ? PyLong_AsLongLong(found) : -1;
  Py_XDECREF(found);
  return bytes;
}

static int dtype_number(PyObject *tensor) {
  static PyObject *last;  // which `dtypes` keeps
  static int number;
  PyObject *dtype = read_attribute(tensor, &dtype_of);
  if (!dtype) return -1;
  if (dtype != last) {
    PyObject *found = PyDict_GetItemWithError(dtypes, dtype);
    number = found ? (int)PyLong_AsLong(found) : 0;
    last = found ? dtype : NULL;
  }
  Py_DECREF(dtype);
  return PyErr_Occurred() ? -1 : number;
}

// A collective is launched; what it is called here, or -1. Bytes: of what this rank brings.
static int64_t note_launch(Notes *self, int row, int kind, Path *path, PyObject *tensor, int awaited, int cuda,
                           int64_t *bytes) {
  Record record = {0};
  int64_t elements = 0, now;
  int site, user;
  int64_t *counts = counts_of(self, row);
  record.sequence = (uint32_t)++counts[0];
  if (!awaited && !cuda) counts[1] = counts[0];
  if (called(self, path, &site, &user) < 0) return -1;
  int dims = told(tensor, &record, &elements);
  int dtype = dims < 0 ? -1 : dtype_number(tensor);
  if (dtype < 0) return -1;
  record.dtype = (uint8_t)dtype;
  if (bytes && record.dtype) {
    *bytes = elements * item_sizes[record.dtype];
  } else if (bytes && (*bytes = bytes_of(tensor)) < 0) {
    return -1;
  }
  if (read_clock(self, &now) < 0) return -1;
  record.number = ++self->count;
  record.launched = now;
  record.arrived = awaited ? 0 : now;
  record.step = (uint32_t)self->step;
  record.group = (uint16_t)row;
  record.site = (uint16_t)site;
  record.user = (uint16_t)user;
  record.kind = (uint8_t)kind;
  record.phase = (uint8_t)self->phase;
  record.flags = (uint8_t)(dims << 1 | (awaited ? ON_GPU : 0));
  write_record(self, &record);
  return record.number * GROUPS + row;
}

static int note_waiting(Notes *self, int64_t given) {
  Record *record = record_of(self, given / GROUPS);
  int64_t now;
  if (record->number != given / GROUPS) return 0;  // its place is another's by now
  if (read_clock(self, &now) < 0) return -1;
  record->waiting = now;
  return 0;
}

static int note_left(Notes *self, int64_t given, int on_gpu) {
  int64_t number = given / GROUPS, row = given % GROUPS, now;
  Record *record = record_of(self, number);
  if (record->number != number) return 0;
  if (read_clock(self, &now) < 0) return -1;
  record->left = now;
  if (record->flags & ON_GPU) return 0;
  came(self, row, record->sequence);
  if (!on_gpu && PyThread_get_thread_ident() == self->main) {
    int64_t waiting = record->waiting, begun = record->launched;
    ((int64_t *)self->waited.buf)[self->phase] += now - waiting;
    ((int64_t *)self->along.buf)[row] += now - waiting;
    if (begun < self->covered[row]) begun = self->covered[row];
    if (begun < waiting) ((int64_t *)self->beside.buf)[row] += waiting - begun;
    self->covered[row] = now;
  }
  return 0;
}

// What this thread had of a processor, and how long it waited for one: what was last known where nothing says so.
static void read_processor(Notes *self, int64_t *had, int64_t *queued) {
  char text[101];
  ssize_t size = self->processor < 0 ? -1 : pread(self->processor, text, sizeof(text) - 1, 0);
  long long first, second;
  text[size < 0 ? 0 : size] = 0;
  int both = sscanf(text, "%lld %lld", &first, &second) == 2;
  *had = both ? first : self->had;
  *queued = both ? second : self->queued;
}

// Steps from this one on were undone.
static void forget(Notes *self) {
  int64_t *sums = numbers_at(self, STEPS_AT);
  for (int i = 0; i < STEPS; ++i, sums += NUMBERS_A_STEP)
    if (*sums > self->step) *sums = 0;
}

// A step begins; what the one before had, waited and compiled is known now.
static int begin_step(Notes *self) {
  int64_t had, queued, *sums = self->sums_of_step, *along = self->along.buf;
  read_processor(self, &had, &queued);
  PyObject *found = PyObject_CallNoArgs(compiled_frames);
  int64_t compiled = found ? PyLong_AsLongLong(found) : -1;
  Py_XDECREF(found);
  if (compiled < 0) return -1;
  if (!self->has_summed) {
    numbers_at(self, NOW_AT)[FIRST] = self->step;
  } else {
    sums[HAD] = had - self->had;
    sums[QUEUED] = queued - self->queued;
    if (compiled > self->compiled) {
      PyObject *seconds = PyObject_CallFunction(compile_seconds, "L", (long long)(compiled - self->compiled));
      double spent = seconds ? PyFloat_AsDouble(seconds) : -1;
      Py_XDECREF(seconds);
      if (spent == -1 && PyErr_Occurred()) return -1;
      sums[COMPILED] = compiled - self->compiled;
      sums[COMPILING] = (int64_t)nearbyint(1e9 * spent);
    }
    memcpy(sums + SPENT, self->spent.buf, 8 * MOST_PHASES);
    memcpy(sums + WAITED, self->waited.buf, 8 * MOST_PHASES);
    for (int row = 0; row < GROUPS; ++row) sums[WAITED_ALONG + row] = along[row] - self->along_before[row];
    if (self->step <= self->summed) forget(self);
  }
  self->summed = self->step;
  self->has_summed = 1;
  self->had = had;
  self->queued = queued;
  self->compiled = compiled;
  memset(self->spent.buf, 0, 8 * MOST_PHASES);
  memset(self->waited.buf, 0, 8 * MOST_PHASES);
  memcpy(self->along_before, along, sizeof(self->along_before));
  self->sums_of_step = sums = numbers_at(self, STEPS_AT) + self->step % STEPS * NUMBERS_A_STEP;
  memset(sums, 0, 8 * NUMBERS_A_STEP);
  sums[0] = self->step + 1;
  return 0;
}
