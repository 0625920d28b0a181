// The same as `notes.py` and `launched.py`, without Python's instructions: what a rank notes of each collective and each
// phase. Compiled by `compiled_notes.py`, which gives the numbers of the record's layout. What is seldom done, a group or
// a place that is new, is Python's (`places.py`).
#include <Python.h>

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <structmember.h>
#include <time.h>
#include <unistd.h>

#define LARGEST UINT32_MAX

typedef struct {
  int64_t launched, arrived, waiting, left;
  uint32_t sequence, step;
  uint16_t group, site, user, nothing;
  uint8_t kind, dtype, phase, flags;
  uint32_t shape[4], padding;
  int64_t number;
} Record;

_Static_assert(sizeof(Record) == RECORD_SIZE, "a record is packed");
_Static_assert(offsetof(Record, flags) == FLAGS_AT, "a record is packed");

// From code, and a place in it, to a number; 0: not known. Code itself, at no place, to whose it is. Code is known by
// where it lies in memory, and `Places` keeps it there.
typedef struct {
  uintptr_t code;
  int at, value;
} Entry;

typedef struct {
  PyObject_HEAD
  Py_buffer memory, spent, waited, along, beside;
  PyObject *places, *sums, *clock, *groups;
  int64_t step, summed, since, count, had, queued, compiled;
  int64_t along_before[GROUPS], *sums_of_step;
  int phase, has_summed, processor;
  unsigned long main;
  Entry *entries;
  size_t room, used;
  int64_t covered[GROUPS];
  int further[SITES], in_vain[SITES];
} Notes;

typedef struct {
  PyObject_HEAD
  Notes *notes;
  Py_buffer signs;
  PyObject *launching, *waited, *sent, *calls, *watchers, *wait_watchers;
  unsigned long main;
} Launches;

typedef struct {
  PyObject_HEAD
  Launches *launches;
  PyObject *axis, *kind, *since, *waits, *watched;
  int64_t record;
  int cuda, main;
} Launched;

static PyTypeObject NotesType, LaunchesType, LaunchedType;
static PyObject *kinds, *dtypes, *phases, *phase_names, *instant, *exit_stack, *getframe, *main_thread_of, *compiled_frames,
    *compile_seconds;
static int64_t item_sizes[256];
static PyObject *word_shape, *word_dtype, *word_is_cuda, *word_nbytes, *word_owner, *word_new_site,
    *word_new_group, *word_enter_context, *word_exit, *word_receive, *one, *no_instant;

// Places in the code.

static size_t place_of(Notes *self, uintptr_t code, int at) {
  uint64_t mixed = ((uint64_t)(code >> 4) + (uint64_t)(unsigned)(at + 1) * 0x9E3779B97F4A7C15u) * 0xD6E8FEB86659FD93u;
  size_t place = (size_t)(mixed >> 32) & (self->room - 1);
  while (self->entries[place].code && (self->entries[place].code != code || self->entries[place].at != at))
    place = (place + 1) & (self->room - 1);
  return place;
}

static int known(Notes *self, uintptr_t code, int at) { return self->entries[place_of(self, code, at)].value; }

static int keep(Notes *self, uintptr_t code, int at, int value) {
  if (2 * (self->used + 1) > self->room) {
    Entry *before = self->entries;
    size_t room = self->room;
    Entry *after = PyMem_Calloc(2 * room, sizeof(Entry));
    if (!after) return PyErr_NoMemory(), -1;
    self->entries = after;
    self->room = 2 * room;
    for (size_t i = 0; i < room; ++i)
      if (before[i].code) after[place_of(self, before[i].code, before[i].at)] = before[i];
    PyMem_Free(before);
  }
  self->entries[place_of(self, code, at)] = (Entry){code, at, value};
  self->used++;
  return 0;
}

static int to_int(PyObject *found) {
  if (!found) return -1;
  long value = PyLong_AsLong(found);
  Py_DECREF(found);
  return (int)value;
}

static uintptr_t code_of(PyFrameObject *frame) {
  PyCodeObject *code = PyFrame_GetCode(frame);  // the frame keeps it
  Py_DECREF(code);
  return (uintptr_t)code;
}

static int owner_of(Notes *self, PyFrameObject *frame) {
  uintptr_t code = code_of(frame);
  int found = known(self, code, -1);
  if (found) return found;
  found = to_int(PyObject_CallMethodObjArgs(self->places, word_owner, (PyObject *)code, NULL));
  if (found < 0 || keep(self, code, -1, found) < 0) return -1;
  return found;
}

static int known_site(Notes *self, PyFrameObject *frame) { return known(self, code_of(frame), PyFrame_GetLasti(frame)); }

static int site_of(Notes *self, PyFrameObject *frame) {
  int found = known_site(self, frame);
  if (found) return found;
  found = to_int(PyObject_CallMethodObjArgs(self->places, word_new_site, (PyObject *)frame, NULL));
  if (found > 0 && keep(self, code_of(frame), PyFrame_GetLasti(frame), found) < 0) return -1;
  return found;
}

static PyFrameObject *above(PyFrameObject *frame) {
  PyFrameObject *back = PyFrame_GetBack(frame);
  Py_DECREF(frame);
  return back;
}

// Frame by frame; takes over the reference to the frame.
static int search(Notes *self, PyFrameObject *frame, int *site, int *user) {
  int here = 0, depth = 0, begun = 0;
  for (int i = 0; i < DEEPEST && frame; ++i, ++depth) {
    int owner = owner_of(self, frame);
    if (owner < 0) goto failed;
    if (owner == USERS) {
      int found = site_of(self, frame);
      if (found < 0) goto failed;
      self->further[here] = here ? depth - begun : 0;
      *site = here ? here : found;
      *user = found;
      Py_DECREF(frame);
      return 0;
    }
    if (owner == ROOT) break;
    if (!here && owner == OTHERS) {
      here = site_of(self, frame);
      begun = depth;
      if (here < 0) goto failed;
    }
    frame = above(frame);
  }
  Py_XDECREF(frame);
  self->in_vain[here]++;
  *site = here;
  *user = 0;
  return 0;
failed:
  Py_DECREF(frame);
  return -1;
}

// Where the communicator was called, and the user's line that led there.
static int called(Notes *self, int *site, int *user) {
  PyFrameObject *frame = PyEval_GetFrame();
  int depth = 0;
  *site = *user = 0;
  Py_XINCREF(frame);
  for (; frame; frame = above(frame), ++depth) {
    int owner = owner_of(self, frame);
    if (owner < 0) {
      Py_DECREF(frame);
      return -1;
    }
    if (owner != OURS) break;
  }
  if (!frame) return 0;
  int here = known_site(self, frame), further = self->further[here];
  if (here && further) {
    PyObject *deep = PyLong_FromLong(depth + further);
    PyObject *found = deep ? PyObject_CallOneArg(getframe, deep) : NULL;
    Py_XDECREF(deep);
    if (found) {
      int there = known_site(self, (PyFrameObject *)found);
      int theirs = there && known(self, code_of((PyFrameObject *)found), -1) == USERS;
      Py_DECREF(found);
      if (theirs) {
        *site = here;
        *user = there;
        Py_DECREF(frame);
        return 0;
      }
    } else if (PyErr_ExceptionMatches(PyExc_ValueError)) {
      PyErr_Clear();  // the stack is not so deep
    } else {
      Py_DECREF(frame);
      return -1;
    }
  } else if (self->in_vain[here] >= TRIES) {
    *site = here;
    Py_DECREF(frame);
    return 0;
  }
  return search(self, frame, site, user);
}

// The record.

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

static int row_of(Notes *self, PyObject *group, PyObject *axis, PyObject *size) {
  PyObject *row = PyDict_GetItemWithError(self->groups, group);
  if (row) return (int)PyLong_AsLong(row);
  if (PyErr_Occurred()) return -1;
  return to_int(PyObject_CallMethodObjArgs(self->places, word_new_group, group, axis, size, NULL));
}

// How many dims are told, and four numbers of them; of more dims the last is of all that follow. Elements in all.
static int told(PyObject *tensor, Record *record, int64_t *elements) {
  PyObject *shape = PyObject_GetAttr(tensor, word_shape);
  if (!shape) return -1;
  Py_ssize_t dims = PySequence_Size(shape);
  int64_t first[4] = {0, 0, 0, 0};
  *elements = 1;
  for (Py_ssize_t dim = 0; dim < dims; ++dim) {
    PyObject *item = PySequence_GetItem(shape, dim);
    int64_t size = item ? PyLong_AsLongLong(item) : -1;
    Py_XDECREF(item);
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

// A collective is launched; what it is called here, or -1. Bytes: of what this rank brings.
static int64_t note_launch(Notes *self, PyObject *group, PyObject *axis, PyObject *size, PyObject *kind,
                           PyObject *tensor, int awaited, int cuda, int64_t *bytes) {
  Record record = {0};
  int64_t elements = 0, now;
  int site, user;
  int row = row_of(self, group, axis, size);
  if (row < 0) return -1;
  PyObject *number = PyDict_GetItemWithError(kinds, kind);
  if (!number) {
    if (!PyErr_Occurred()) PyErr_SetObject(PyExc_KeyError, kind);
    return -1;
  }
  int64_t *counts = counts_of(self, row);
  record.sequence = (uint32_t)++counts[0];
  if (!awaited && !cuda) counts[1] = counts[0];
  if (called(self, &site, &user) < 0) return -1;
  int dims = told(tensor, &record, &elements);
  if (dims < 0) return -1;
  PyObject *dtype = PyObject_GetAttr(tensor, word_dtype);
  if (!dtype) return -1;
  PyObject *found = PyDict_GetItemWithError(dtypes, dtype);
  Py_DECREF(dtype);
  if (!found && PyErr_Occurred()) return -1;
  record.dtype = found ? (uint8_t)PyLong_AsLong(found) : 0;
  if (bytes && record.dtype) {
    *bytes = elements * item_sizes[record.dtype];
  } else if (bytes) {
    PyObject *held = PyObject_GetAttr(tensor, word_nbytes);
    *bytes = held ? PyLong_AsLongLong(held) : -1;
    Py_XDECREF(held);
    if (*bytes == -1 && PyErr_Occurred()) return -1;
  }
  if (read_clock(self, &now) < 0) return -1;
  record.number = ++self->count;
  record.launched = now;
  record.arrived = awaited ? 0 : now;
  record.step = (uint32_t)self->step;
  record.group = (uint16_t)row;
  record.site = (uint16_t)site;
  record.user = (uint16_t)user;
  record.kind = (uint8_t)PyLong_AsLong(number);
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

static PyObject *notes_doing(Notes *self, PyObject *phase) {
  int64_t now, *current = numbers_at(self, NOW_AT);
  PyObject *number = PyDict_GetItemWithError(phases, phase);
  if (!number) {
    if (!PyErr_Occurred()) PyErr_SetObject(PyExc_KeyError, phase);
    return NULL;
  }
  if (read_clock(self, &now) < 0) return NULL;
  int before = self->phase;
  self->phase = (int)PyLong_AsLong(number);
  ((int64_t *)self->spent.buf)[before] += now - self->since;
  self->since = now;
  if (self->phase && (!self->has_summed || self->summed != self->step) && begin_step(self) < 0) return NULL;
  current[DOING] = self->phase;
  current[SINCE] = now;
  current[STEP] = self->step;
  Record record = {.launched = now, .kind = PHASE, .number = ++self->count};
  record.step = (uint32_t)self->step;
  record.phase = (uint8_t)self->phase;
  write_record(self, &record);
  return Py_NewRef(PyTuple_GET_ITEM(phase_names, before));
}

static PyObject *notes_launched(Notes *self, PyObject *given, PyObject *named) {
  static char *words[] = {"group", "axis", "size", "kind", "tensor", "awaited", NULL};
  PyObject *group, *axis, *size, *kind, *tensor;
  int awaited = 0;
  if (!PyArg_ParseTupleAndKeywords(given, named, "OOOOO|p", words, &group, &axis, &size, &kind, &tensor, &awaited))
    return NULL;
  int cuda = to_int(PyObject_GetAttr(tensor, word_is_cuda));
  if (cuda < 0) return NULL;
  int64_t record = note_launch(self, group, axis, size, kind, tensor, awaited, cuda, NULL);
  return record < 0 ? NULL : PyLong_FromLongLong(record);
}

static PyObject *notes_arrived(Notes *self, PyObject *given) {
  int64_t record = PyLong_AsLongLong(given), now;
  if (record == -1 && PyErr_Occurred()) return NULL;
  Record *place = record_of(self, record / GROUPS);
  if (place->number == record / GROUPS) {
    if (read_clock(self, &now) < 0) return NULL;
    place->arrived = now;
    came(self, record % GROUPS, place->sequence);
  }
  Py_RETURN_NONE;
}

static PyObject *notes_waiting(Notes *self, PyObject *given) {
  int64_t record = PyLong_AsLongLong(given);
  if ((record == -1 && PyErr_Occurred()) || note_waiting(self, record) < 0) return NULL;
  Py_RETURN_NONE;
}

static PyObject *notes_left(Notes *self, PyObject *given, PyObject *named) {
  static char *words[] = {"record", "on_gpu", NULL};
  long long record;
  int on_gpu = 0;
  if (!PyArg_ParseTupleAndKeywords(given, named, "L|p", words, &record, &on_gpu)) return NULL;
  if (note_left(self, record, on_gpu) < 0) return NULL;
  Py_RETURN_NONE;
}

static PyObject *notes_on_device(Notes *self, PyObject *given) {
  long long spent, waited;
  if (!PyArg_ParseTuple(given, "LL", &spent, &waited)) return NULL;
  self->sums_of_step[ON_DEVICE] = spent;
  self->sums_of_step[DEVICE_WAITED] = waited;
  Py_RETURN_NONE;
}

static int whole_numbers(PyObject *sums, const char *name, Py_buffer *view, Py_ssize_t count) {
  PyObject *found = PyObject_GetAttrString(sums, name);
  int failed = !found || PyObject_GetBuffer(found, view, PyBUF_WRITABLE) < 0;
  Py_XDECREF(found);
  if (!failed && view->len != 8 * count) {
    PyErr_Format(PyExc_ValueError, "%s: %zd bytes", name, view->len);
    failed = 1;
  }
  return failed ? -1 : 0;
}

static int notes_init(Notes *self, PyObject *given, PyObject *named) {
  static char *words[] = {"memory", "places", "sums", "clock", NULL};
  PyObject *memory, *clock = Py_None;
  if (!PyArg_ParseTupleAndKeywords(given, named, "OOO|O", words, &memory, &self->places, &self->sums, &clock)) {
    self->places = self->sums = NULL;
    return -1;
  }
  Py_INCREF(self->places);
  Py_INCREF(self->sums);
  self->clock = clock == Py_None ? NULL : Py_NewRef(clock);
  self->groups = PyObject_GetAttrString(self->places, "groups");
  if (!self->groups || PyObject_GetBuffer(memory, &self->memory, PyBUF_WRITABLE) < 0) return -1;
  if (self->memory.len != BYTES) {
    PyErr_Format(PyExc_ValueError, "%zd bytes are no flight record", self->memory.len);
    return -1;
  }
  if (whole_numbers(self->sums, "spent", &self->spent, MOST_PHASES) < 0 ||
      whole_numbers(self->sums, "waited", &self->waited, MOST_PHASES) < 0 ||
      whole_numbers(self->sums, "along", &self->along, GROUPS) < 0 ||
      whole_numbers(self->sums, "beside", &self->beside, GROUPS) < 0)
    return -1;
  self->processor = to_int(PyObject_GetAttrString(self->sums, "processor"));
  self->sums_of_step = numbers_at(self, STEPS_AT);
  if (PyErr_Occurred()) return -1;
  self->room = 1024;
  self->entries = PyMem_Calloc(self->room, sizeof(Entry));
  if (!self->entries) return PyErr_NoMemory(), -1;
  self->main = PyThread_get_thread_ident();
  return read_clock(self, &self->since);
}

static int notes_traverse(Notes *self, visitproc visit, void *arg) {
  Py_VISIT(self->places);
  Py_VISIT(self->sums);
  Py_VISIT(self->clock);
  Py_VISIT(self->groups);
  return 0;
}

static int notes_clear(Notes *self) {
  Py_CLEAR(self->clock);  // the only one through which anything could lead back here
  return 0;
}

static void notes_dealloc(Notes *self) {
  PyObject_GC_UnTrack(self);
  Py_buffer *views[] = {&self->memory, &self->spent, &self->waited, &self->along, &self->beside};
  for (size_t i = 0; i < sizeof(views) / sizeof(*views); ++i)
    if (views[i]->obj) PyBuffer_Release(views[i]);
  Py_CLEAR(self->places);
  Py_CLEAR(self->sums);
  Py_CLEAR(self->clock);
  Py_CLEAR(self->groups);
  PyMem_Free(self->entries);
  Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef notes_methods[] = {
    {"doing", (PyCFunction)notes_doing, METH_O, "This rank begins with something; what it did before."},
    {"launched", (PyCFunction)(void (*)(void))notes_launched, METH_VARARGS | METH_KEYWORDS, "See the twin."},
    {"arrived", (PyCFunction)notes_arrived, METH_O, "The GPU has come to a collective."},
    {"waiting", (PyCFunction)notes_waiting, METH_O, "From now on a collective is waited for."},
    {"on_device", (PyCFunction)notes_on_device, METH_VARARGS, "What the clock of a GPU says of steps."},
    {"left", (PyCFunction)(void (*)(void))notes_left, METH_VARARGS | METH_KEYWORDS, "And now not any more."},
    {NULL},
};

static PyMemberDef notes_members[] = {
    {"step", T_LONGLONG, offsetof(Notes, step), 0, "The one that runs."},
    {NULL},
};

static PyTypeObject NotesType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "phalanx_notes.Notes",
    .tp_doc = "Of one rank; see the twin.",
    .tp_basicsize = sizeof(Notes),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)notes_init,
    .tp_traverse = (traverseproc)notes_traverse,
    .tp_clear = (inquiry)notes_clear,
    .tp_dealloc = (destructor)notes_dealloc,
    .tp_methods = notes_methods,
    .tp_members = notes_members,
};

// Collectives that are launched.

static int watched_by(Launches *self, PyObject *axis, PyObject *kind, PyObject *tensor) {
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(self->watchers); ++i) {
    PyObject *watcher = Py_NewRef(PyList_GET_ITEM(self->watchers, i));
    PyObject *done = PyObject_CallFunctionObjArgs(watcher, axis, kind, tensor, NULL);
    Py_DECREF(watcher);
    if (!done) return -1;
    Py_DECREF(done);
  }
  return 0;
}

static int add(PyObject *counts, PyObject *key, PyObject *more) {
  PyObject *before = PyDict_GetItemWithError(counts, key);
  if (!before && PyErr_Occurred()) return -1;
  PyObject *sum = before ? PyNumber_Add(before, more) : Py_NewRef(more);
  int failed = !sum || PyDict_SetItem(counts, key, sum) < 0;
  Py_XDECREF(sum);
  return failed ? -1 : 0;
}

static int count(Launches *self, PyObject *axis, PyObject *kind, int64_t bytes, PyObject *share) {
  PyObject *sent;
  if (PyFloat_Check(share)) {
    sent = PyLong_FromDouble(nearbyint((double)bytes * PyFloat_AS_DOUBLE(share)));  // halves to even, as `round` does
  } else {
    PyObject *all = PyLong_FromLongLong(bytes);
    sent = all ? PyNumber_Multiply(all, share) : NULL;
    Py_XDECREF(all);
  }
  PyObject *key = sent ? PyTuple_Pack(2, axis, kind) : NULL;
  int failed = !key || add(self->calls, key, one) < 0 || add(self->sent, key, sent) < 0;
  Py_XDECREF(key);
  Py_XDECREF(sent);
  return failed ? -1 : 0;
}

static PyObject *new_launched(Launches *self, PyObject *axis, PyObject *kind, int64_t record, int cuda) {
  PyObject *since = cuda ? PyObject_CallOneArg(instant, Py_True) : NULL;
  if (cuda && !since) return NULL;
  Launched *made = PyObject_GC_New(Launched, &LaunchedType);
  if (!made) {
    Py_XDECREF(since);
    return NULL;
  }
  made->launches = (Launches *)Py_NewRef(self);
  made->axis = Py_NewRef(axis);
  made->kind = Py_NewRef(kind);
  made->since = since;
  made->waits = made->watched = NULL;
  made->record = record;
  made->cuda = cuda;
  made->main = 0;
  PyObject_GC_Track(made);
  return (PyObject *)made;
}

static PyObject *launches_launched(Launches *self, PyObject *const *given, Py_ssize_t number) {
  if (number != 6) return PyErr_Format(PyExc_TypeError, "6 arguments are taken, not %zd", number);
  PyObject *group = given[0], *axis = given[1], *size = given[2], *kind = given[3], *tensor = given[4];
  int64_t bytes, *signs = self->signs.buf;
  int cuda = to_int(PyObject_GetAttr(tensor, word_is_cuda));
  if (cuda < 0) return NULL;
  int awaited = cuda && self->launching;
  int64_t record = note_launch(self->notes, group, axis, size, kind, tensor, awaited, cuda, &bytes);
  if (record < 0 || watched_by(self, axis, kind, tensor) < 0 || count(self, axis, kind, bytes, given[5]) < 0)
    return NULL;
  if (awaited) {
    PyObject *called = PyLong_FromLongLong(record);
    PyObject *done = called ? PyObject_CallOneArg(self->launching, called) : NULL;
    Py_XDECREF(called);
    if (!done) return NULL;
    Py_DECREF(done);
  } else {
    signs[0]++;
  }
  return new_launched(self, axis, kind, record, cuda);
}

static PyObject *launches_recorded(Launches *self, PyObject *const *given, Py_ssize_t number) {
  if (number != 5) return PyErr_Format(PyExc_TypeError, "5 arguments are taken, not %zd", number);
  PyObject *group = given[0], *axis = given[1], *size = given[2], *kind = given[3], *tensor = given[4];
  int cuda = to_int(PyObject_GetAttr(tensor, word_is_cuda));
  int received = cuda < 0 ? -1 : PyObject_RichCompareBool(kind, word_receive, Py_EQ);
  if (received < 0 || (received && watched_by(self, axis, kind, tensor) < 0)) return NULL;
  int64_t record = note_launch(self->notes, group, axis, size, kind, tensor, 0, cuda, NULL);
  return record < 0 ? NULL : new_launched(self, axis, kind, record, cuda);
}

static int launches_init(Launches *self, PyObject *given, PyObject *named) {
  static char *words[] = {"notes", "signs", "launching", "waited", NULL};
  PyObject *notes, *signs, *launching, *waited;
  if (!PyArg_ParseTupleAndKeywords(given, named, "O!OOO", words, &NotesType, &notes, &signs, &launching, &waited))
    return -1;
  if (PyObject_GetBuffer(signs, &self->signs, PyBUF_WRITABLE) < 0) return -1;
  if (self->signs.len < 24) return PyErr_SetString(PyExc_ValueError, "three whole numbers are needed"), -1;
  self->notes = (Notes *)Py_NewRef(notes);
  self->launching = launching == Py_None ? NULL : Py_NewRef(launching);
  self->waited = Py_NewRef(waited);
  self->watchers = PyList_New(0);
  self->wait_watchers = PyList_New(0);
  PyObject *collections = PyImport_ImportModule("collections");
  self->sent = collections ? PyObject_CallMethod(collections, "Counter", NULL) : NULL;
  self->calls = collections ? PyObject_CallMethod(collections, "Counter", NULL) : NULL;
  Py_XDECREF(collections);
  PyObject *thread = self->sent ? PyObject_CallNoArgs(main_thread_of) : NULL;
  PyObject *ident = thread ? PyObject_GetAttrString(thread, "ident") : NULL;
  self->main = ident ? PyLong_AsUnsignedLong(ident) : 0;
  Py_XDECREF(thread);
  Py_XDECREF(ident);
  return PyErr_Occurred() || !self->watchers || !self->wait_watchers ? -1 : 0;
}

static int launches_traverse(Launches *self, visitproc visit, void *arg) {
  Py_VISIT(self->notes);
  Py_VISIT(self->launching);
  Py_VISIT(self->waited);
  Py_VISIT(self->sent);
  Py_VISIT(self->calls);
  Py_VISIT(self->watchers);
  Py_VISIT(self->wait_watchers);
  return 0;
}

static int launches_clear(Launches *self) {
  // who watches is forgotten, and not the list of them, which one that is used after this still reads
  if (self->watchers) PyList_SetSlice(self->watchers, 0, PyList_GET_SIZE(self->watchers), NULL);
  if (self->wait_watchers) PyList_SetSlice(self->wait_watchers, 0, PyList_GET_SIZE(self->wait_watchers), NULL);
  Py_CLEAR(self->launching);
  return 0;
}

static void launches_dealloc(Launches *self) {
  PyObject_GC_UnTrack(self);
  if (self->signs.obj) PyBuffer_Release(&self->signs);
  Py_CLEAR(self->notes);
  Py_CLEAR(self->launching);
  Py_CLEAR(self->waited);
  Py_CLEAR(self->sent);
  Py_CLEAR(self->calls);
  Py_CLEAR(self->watchers);
  Py_CLEAR(self->wait_watchers);
  Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMethodDef launches_methods[] = {
    {"launched", (PyCFunction)(void (*)(void))launches_launched, METH_FASTCALL, "See the twin."},
    {"recorded", (PyCFunction)(void (*)(void))launches_recorded, METH_FASTCALL, "One that is not counted."},
    {NULL},
};

static PyMemberDef launches_members[] = {
    {"sent", T_OBJECT_EX, offsetof(Launches, sent), READONLY, NULL},
    {"calls", T_OBJECT_EX, offsetof(Launches, calls), READONLY, NULL},
    {"watchers", T_OBJECT_EX, offsetof(Launches, watchers), READONLY, NULL},
    {"wait_watchers", T_OBJECT_EX, offsetof(Launches, wait_watchers), READONLY, NULL},
    {NULL},
};

static PyTypeObject LaunchesType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "phalanx_notes.Launches",
    .tp_doc = "All of the communicators that share it; see the twin.",
    .tp_basicsize = sizeof(Launches),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)launches_init,
    .tp_traverse = (traverseproc)launches_traverse,
    .tp_clear = (inquiry)launches_clear,
    .tp_dealloc = (destructor)launches_dealloc,
    .tp_methods = launches_methods,
    .tp_members = launches_members,
};

static PyObject *launched_enter(Launched *self, PyObject *nothing) {
  Launches *launches = self->launches;
  if (PyThread_get_thread_ident() == launches->main) {
    self->main = 1;
    ((int64_t *)launches->signs.buf)[2] = 1;
  }
  if (note_waiting(launches->notes, self->record) < 0) return NULL;
  if (self->cuda) {
    PyObject *waits = PyObject_CallOneArg(instant, Py_True);
    if (!waits) return NULL;
    Py_XSETREF(self->waits, waits);
  }
  if (PyList_GET_SIZE(launches->wait_watchers)) {
    Py_XSETREF(self->watched, PyObject_CallNoArgs(exit_stack));
    if (!self->watched) return NULL;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(launches->wait_watchers); ++i) {
      PyObject *watcher = Py_NewRef(PyList_GET_ITEM(launches->wait_watchers, i));
      PyObject *entered = PyObject_CallFunctionObjArgs(watcher, self->axis, self->kind, NULL);
      PyObject *done = entered ? PyObject_CallMethodOneArg(self->watched, word_enter_context, entered) : NULL;
      Py_DECREF(watcher);
      Py_XDECREF(entered);
      if (!done) return NULL;
      Py_DECREF(done);
    }
  }
  Py_RETURN_NONE;
}

static PyObject *launched_exit(Launched *self, PyObject *const *given, Py_ssize_t number) {
  Launches *launches = self->launches;
  if (number != 3) return PyErr_Format(PyExc_TypeError, "3 arguments are taken, not %zd", number);
  if (self->watched) {
    PyObject *watched = self->watched;
    self->watched = NULL;
    PyObject *done = PyObject_CallMethodObjArgs(watched, word_exit, given[0], given[1], given[2], NULL);
    Py_DECREF(watched);
    if (!done) return NULL;
    Py_DECREF(done);
  }
  if (given[0] == Py_None) {  // where it failed it was never left
    if (note_left(launches->notes, self->record, self->cuda) < 0) return NULL;
    if (self->cuda) {
      PyObject *ended = PyObject_CallOneArg(instant, Py_True);
      PyObject *waits = self->waits ? self->waits : no_instant;
      PyObject *done =
          ended ? PyObject_CallFunctionObjArgs(launches->waited, self->axis, self->since, waits, ended, NULL) : NULL;
      if (!done) {
        Py_XDECREF(ended);
        return NULL;
      }
      Py_DECREF(done);
      Py_XSETREF(self->since, ended);
    }
  }
  if (self->main) ((int64_t *)launches->signs.buf)[2] = 0;
  Py_RETURN_NONE;
}

static int launched_traverse(Launched *self, visitproc visit, void *arg) {
  Py_VISIT(self->launches);
  Py_VISIT(self->since);
  Py_VISIT(self->waits);
  Py_VISIT(self->watched);
  return 0;
}

static void launched_dealloc(Launched *self) {
  PyObject_GC_UnTrack(self);
  Py_CLEAR(self->launches);
  Py_CLEAR(self->axis);
  Py_CLEAR(self->kind);
  Py_CLEAR(self->since);
  Py_CLEAR(self->waits);
  Py_CLEAR(self->watched);
  PyObject_GC_Del(self);
}

static PyMethodDef launched_methods[] = {
    {"__enter__", (PyCFunction)launched_enter, METH_NOARGS, NULL},
    {"__exit__", (PyCFunction)(void (*)(void))launched_exit, METH_FASTCALL, NULL},
    {NULL},
};

static PyTypeObject LaunchedType = {
    PyVarObject_HEAD_INIT(NULL, 0).tp_name = "phalanx_notes.Launched",
    .tp_doc = "Entered while this rank can do nothing but wait for it.",
    .tp_basicsize = sizeof(Launched),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    .tp_traverse = (traverseproc)launched_traverse,
    .tp_dealloc = (destructor)launched_dealloc,
    .tp_methods = launched_methods,
};

// The module.

static PyObject *of_module(const char *module, const char *name) {
  PyObject *from = PyImport_ImportModule(module);
  PyObject *found = from ? PyObject_GetAttrString(from, name) : NULL;
  Py_XDECREF(from);
  return found;
}

static int read_item_sizes(void) {
  PyObject *dtype, *number;
  for (Py_ssize_t at = 0; PyDict_Next(dtypes, &at, &dtype, &number);) {
    int size = to_int(PyObject_GetAttrString(dtype, "itemsize"));
    if (size < 0) return -1;
    item_sizes[PyLong_AsLong(number) & 255] = size;
  }
  return 0;
}

static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, .m_name = "phalanx_notes", .m_size = -1};

PyMODINIT_FUNC PyInit_phalanx_notes(void) {
  const char *twin = "phalanx.parallel.communication.notes";
  struct {
    PyObject **to;
    const char *module, *name;
  } needed[] = {
      {&kinds, twin, "KIND_NUMBERS"},         {&dtypes, twin, "DTYPE_NUMBERS"},
      {&phases, twin, "PHASE_NUMBERS"},       {&phase_names, "phalanx.flight", "PHASES"},
      {&exit_stack, "contextlib", "ExitStack"}, {&getframe, "sys", "_getframe"},
      {&main_thread_of, "threading", "main_thread"},
      {&compiled_frames, "phalanx.parallel.torch_private", "compiled_frames"},
      {&compile_seconds, "phalanx.parallel.torch_private", "compile_seconds"},
      {&instant, "phalanx.parallel.communication.instants", "now"},
  };
  for (size_t i = 0; i < sizeof(needed) / sizeof(*needed); ++i)
    if (!(*needed[i].to = of_module(needed[i].module, needed[i].name))) return NULL;
  struct {
    PyObject **to;
    const char *text;
  } words[] = {
      {&word_shape, "shape"},       {&word_dtype, "dtype"},         {&word_is_cuda, "is_cuda"},
      {&word_nbytes, "nbytes"},     {&word_owner, "owner"},
      {&word_new_site, "new_site"}, {&word_new_group, "new_group"}, {&word_enter_context, "enter_context"},
      {&word_exit, "__exit__"},     {&word_receive, "receive"},
  };
  for (size_t i = 0; i < sizeof(words) / sizeof(*words); ++i)
    if (!(*words[i].to = PyUnicode_InternFromString(words[i].text))) return NULL;
  if (!(one = PyLong_FromLong(1)) || !(no_instant = PyFloat_FromDouble(0.0)) || read_item_sizes() < 0) return NULL;
  if (PyType_Ready(&NotesType) < 0 || PyType_Ready(&LaunchesType) < 0 || PyType_Ready(&LaunchedType) < 0) return NULL;
  PyObject *module = PyModule_Create(&definition);
  if (!module || PyModule_AddObjectRef(module, "Notes", (PyObject *)&NotesType) < 0 ||
      PyModule_AddObjectRef(module, "Launches", (PyObject *)&LaunchesType) < 0)
    return NULL;
  return module;
}
