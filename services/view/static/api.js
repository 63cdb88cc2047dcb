// Reads the server, or the data in an exported page. Steps are kept and only new ones asked for.

import { exported } from "./exported.js";

export async function get(path, parameters = {}) {
  if (exported) return exported.get(path, parameters);
  const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== "" && value !== undefined));
  const response = await fetch(`${path}${query.size ? `?${query}` : ""}`);
  if (response.status === 401) throw new Error("this page needs the token: open the address that `penstock view` printed");
  const body = await response.json();
  if (!response.ok) throw Object.assign(new Error(body.error?.message ?? `the server answered ${response.status}`), { isFinal: response.status < 500 });
  return body;
}

export class Steps {
  constructor(run) {
    this.run = run;
    this.rows = [];
    this.generation = "";
  }

  // Returns whether anything is new. An answer has a part of a long run; the rows change when all parts have come.
  async poll() {
    let { rows, generation } = this;
    let found;
    do {
      found = await get(`api/runs/${this.run}/steps`, { after: rows.length, generation });
      rows = rows.slice(0, found.start).concat(found.rows);
      generation = found.generation;
    } while (rows.length < found.num_rows);
    const isNew = rows.at(-1) !== this.rows.at(-1);
    Object.assign(this, { rows, generation });
    return isNew;
  }
}

// Where a picture is; empty if it is not kept, as one without a file is, which is named by its hash alone.
export const image = (run, name) => (!name.includes(".") ? "" : exported ? exported.image(run, name) : `api/runs/${run}/images/${name}`);

const KINDS = { f4: Float32Array, i4: Int32Array, u1: Uint8Array };

export function array(base64, kind) {
  if (!base64) return null;
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let index = 0; index < text.length; index += 1) bytes[index] = text.charCodeAt(index);
  return new KINDS[kind](bytes.buffer);
}
