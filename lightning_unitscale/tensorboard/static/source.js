// Where the data comes from: TensorBoard's server, or the page itself (in a report).

/** Undoes `responses.frame` on the server. */
export function parseFrame(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
  const arrays = {};
  let start = 4 + length;
  for (const { name, shape } of header.arrays) {
    const size = shape.reduce((matmul, one) => matmul * one, 1);
    arrays[name] = new Float32Array(buffer, start, size);
    start += 4 * size;
  }
  return { header, arrays };
}

/** Answers by route and query, whose bytes `read` resolves to. */
class Source {
  runs() {
    return this.json('runs', {});
  }

  async json(route, query) {
    return JSON.parse(new TextDecoder().decode(await this.read(route, query)));
  }

  async frame(route, query) {
    return parseFrame(await this.read(route, query));
  }
}

/** The routes of the plugin. */
export class ServerSource extends Source {
  constructor(base) {
    super();
    this.base = base;
    this.isLive = true;
  }

  async read(route, query) {
    const url = new URL(route, this.base);
    url.search = new URLSearchParams(query);
    const response = await fetch(url);
    if (!response.ok) throw new Error(`${response.status}: ${(await response.text()).slice(0, 300)}`);
    return response.arrayBuffer();
  }
}

/** The same answers, compressed and in base64, from a script element of the page. */
export class EmbeddedSource extends Source {
  constructor(answers) {
    super();
    this.answers = answers;
    this.isLive = false;
  }

  async read(route, query) {
    const answer = this.answers[[route, ...Object.values(query)].join('\n')];
    if (answer === undefined) throw new Error(`${query.tensor ?? route}: not in this report`);
    const bytes = Uint8Array.from(atob(answer), (letter) => letter.charCodeAt(0));
    const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('gzip'));
    return new Response(plain).arrayBuffer();
  }
}
